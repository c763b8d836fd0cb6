"""The base of all C++ kernels: the library, and the torch reference for what it lacks."""

from __future__ import annotations

from alignedserve.kernels.build import sources
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.library import Library


class NativeLibrary(Reference):
    def __init__(self, library: Library) -> None:
        self.library = library
        self.name = f"C++, {library.isa}"

    @property
    def identity(self) -> str:
        return f"{self.name}, {sources()}"
