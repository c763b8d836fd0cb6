"""The memory of a decode worker's device, behind one interface, by which forms/memory/ plugs in.

plain.py           The interface. As it stands it is plain: each block pair holds the KV of one request.
folding.py         Folds pairs of decodes that only layers without a window or stretches read any more.
"""
