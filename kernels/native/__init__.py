"""Kernels in C++ for CPUs.

decoder.py    All layers of a decoder in one call of C++.
kernels.py    The C++ kernels behind dispatcher.py's interface; the torch reference fills in the rest.
"""
