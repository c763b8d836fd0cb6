"""When a step has failed for want of memory, and when for another reason."""

from __future__ import annotations

import torch

# What torch says where it is no OutOfMemoryError of its own: the CPU's allocator, oneDNN, MKL.
_SAID = ("can't allocate memory", "not enough memory", "could not create a memory", "out of memory")


def out_of_memory(error: BaseException) -> str | None:
    """The reason in a line, or None where memory was not it."""
    said = str(error).partition("\n")[0]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return said or "out of memory"
    if isinstance(error, RuntimeError) and any(words in said.lower() for words in _SAID):
        return said
    return None
