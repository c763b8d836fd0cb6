"""Copies of KV between the device cache and the arena of the pool.

aside.py        Copies between the device and the arena that go on beside the steps, in a thread of their own.
checkpoints.py  Vectors of single tokens from slot to slot of the device cache, and to the worker's own memory
copies.py       Moves KV, or hidden vectors, between the device cache and pages of the arena.
int8_pages.py   A full page of KV as int8, and back (ALISE §3.2): kvpool/arena/int8_layout.py draws its inside.
"""
