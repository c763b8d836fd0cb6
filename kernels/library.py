"""Load the C++ library and return its kernels for one instruction set."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from alignedserve.kernels.build import LIBRARY, X86, sources

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as csrc/vectors.h numbers them
KEPT = DTYPES | {torch.int8: 3}  # of K and V in a cache


_NO_MEMORY = -1  # as csrc/table.cpp has it


class NoLibrary(Exception):
    """Raised where the library was not built or does not load; the message is one line."""


class Library:
    """The library's kernels for one instruction set: the best that this CPU has, unless another is named."""

    def __init__(self, isa: str | None = None, path: Path = LIBRARY) -> None:
        self._library = _loaded(path)
        usable = usable_sets(path)
        self.usable = ", ".join(usable)
        self.isa = isa or usable[-1]
        if self.isa not in usable:
            raise NoLibrary(f"instruction set {self.isa} is not among those usable here: {self.usable}")

    def kernel(self, name: str, *argtypes: Any, returns: Any = None) -> Callable[..., Any]:
        """Return the function of that name, with the argument types of csrc/kernels.h.

        It raises MemoryError where it finds no scratch memory; its outputs are then undefined.
        """
        address = self._library.as_kernel(self.isa.encode(), name.encode())
        if not address:
            raise NoLibrary(f"the library has no kernel {name} for {self.isa}: build it again")
        function = ctypes.CFUNCTYPE(returns or ctypes.c_int, *argtypes)(address)
        if returns in (None, ctypes.c_int):
            check: Any = partial(_checked, name)
            function.errcheck = check
        return function


def _checked(name: str, returned: int, _function: object, _arguments: object) -> int:
    if returned == _NO_MEMORY:
        raise MemoryError(f"no memory for what the kernel {name} works in")
    return returned


def usable_sets(path: Path = LIBRARY) -> list[str]:
    """Return the instruction sets that the library was built for and this CPU has, from the least to the best."""
    named: bytes = _loaded(path).as_usable()
    return named.decode().split()


def lacked_set(path: Path = LIBRARY) -> str | None:
    """Return the best instruction set of this CPU where the library has none as good: it was built for another CPU."""
    usable, library = usable_sets(path), _loaded(path)
    better = [isa for isa in X86 if library.as_cpu_has(isa.encode())][-1:]
    return None if not better or better[0] in usable else better[0]


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    if not path.is_file():
        raise NoLibrary(f"{path.name} was not built: install a C++ compiler and AlignedServe again")
    try:
        library = _open(path)
    except OSError as error:
        raise NoLibrary(f"{path.name} does not load: {error}") from error
    if _built_from(library) != sources():
        raise NoLibrary(f"{path.name} was built from other sources than these: `python -m alignedserve.kernels.build`")
    library.as_usable.restype = ctypes.c_char_p
    library.as_kernel.restype = ctypes.c_void_p
    library.as_kernel.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    return library


def _built_from(library: ctypes.CDLL) -> str:
    if not hasattr(library, "as_built_from"):
        return ""
    library.as_built_from.restype = ctypes.c_char_p
    named: bytes = library.as_built_from()
    return named.decode()


def _open(path: Path) -> ctypes.CDLL:
    """Return the loaded library. It uses torch's OpenMP, which the whole process sees, or else the system's."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if "GOMP_" not in str(error):
            raise
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
