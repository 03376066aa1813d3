"""Rows on the host: how far each is filled, and what waits to be written on the device.

Words of this folder: a *record* is a row with staged writes, numbered in the order of the rows'
first calls; a *piece* is what one call appended to one row of one group, allocation block ids; a
*packet* is the memory in which all records travel to the device, pieces merged and split into
columns. `rows` is what a manager holds; it stages in `_staging.c` or in `python_staging`, which do
the same.
"""
