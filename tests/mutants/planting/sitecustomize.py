"""Loads a mutant in place of one module's file, in every process that has this folder first on its path.

Python imports a module of this name whenever it starts. MUTANT_FILE names the file, MUTANT_SOURCE the mutant's source.
"""

from __future__ import annotations

import linecache
import os
from importlib.machinery import SourceFileLoader
from types import CodeType

_FILE, _SOURCE = os.environ.get("MUTANT_FILE", ""), os.environ.get("MUTANT_SOURCE", "")
_code_of_the_file = SourceFileLoader.get_code


def _code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
    if os.path.realpath(loader.path) != _FILE:
        return _code_of_the_file(loader, fullname)
    with open(_SOURCE, encoding="utf-8") as file:
        source = file.read()
    # Triton and inspect read the lines of functions; without a time of change they are not read from the file again.
    linecache.cache[loader.path] = (len(source), None, source.splitlines(keepends=True), loader.path)
    return compile(source, loader.path, "exec", dont_inherit=True)


if _FILE:
    SourceFileLoader.get_code = _code  # pyrefly: ignore[bad-assignment, method-assign]
