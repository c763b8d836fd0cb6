"""Kernels in C++ for CPUs.

attention.py  Attention over paged blocks, in C++.
copies.py     Between the device and pages, and int8, in C++.
decoder.py    All layers of a decoder in one call of C++.
kernels.py    The C++ kernels behind the interface of dispatch.py; what they lack, the torch reference does.
library.py    What all kernels in C++ start from: the library, and the torch reference for what it lacks.
tokens.py     What is done to each of a step's tokens by itself, in C++; what it lacks, the torch reference does.
"""
