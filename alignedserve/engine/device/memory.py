"""Tells whether a step has failed because memory was too small, or for another reason."""

from __future__ import annotations

import torch

# Messages of torch that are not an OutOfMemoryError: from the CPU's allocator, oneDNN and MKL, and from CUDA's
# libraries, such as CUBLAS_STATUS_ALLOC_FAILED.
_MESSAGES = (
    *("can't allocate memory", "not enough memory", "could not create a memory"),
    *("out of memory", "status_alloc_failed"),
)


def out_of_memory(error: BaseException) -> str | None:
    """Return the first line of the error, or None if memory was not its reason."""
    message = str(error).partition("\n")[0]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return message or "out of memory"
    if isinstance(error, RuntimeError) and any(words in message.lower() for words in _MESSAGES):
        return message
    return None
