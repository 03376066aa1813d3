"""Recorded schedules: their files, the scheduler they come from, one check, and their replay."""
