"""Kernels in C++ for CPUs.

adapters.py   Adds to a linear layer what its adapters change, in C++.
attention.py  Attention over paged blocks, in C++.
copies.py     Copies between the device and pages, and int8, in C++.
decoder.py    All layers of a decoder in one call of C++.
kernels.py    The C++ kernels behind dispatcher.py's interface; the torch reference fills in the rest.
library.py    The base of all C++ kernels: the library, and the torch reference for what it lacks.
tokens.py     Norms, rotation and activation of each token, and greedy tokens, in C++.
"""
