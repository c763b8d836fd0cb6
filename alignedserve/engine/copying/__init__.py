"""Copies of KV between the device cache and the arena of the pool.

aside.py   Copies between the device and the arena beside the steps, in a thread of their own.
copies.py  Copies KV between the device cache and pages of the arena.
"""
