"""Plugging into vLLM: plugin, v2 and v1 tables, configuration, recorded schedules."""
