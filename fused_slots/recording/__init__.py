"""Recorded schedules: their files, one check, and their replay."""
