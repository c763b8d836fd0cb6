"""The memory of a decode worker's device, behind one interface, by which forms/memory/ plugs in.

plain.py           The interface, and plain memory: blocks as they are, folded behind windows.
"""
