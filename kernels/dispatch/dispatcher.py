"""Choose the kernels that run: the fastest for this device, dtype and installation, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch

from alignedserve.fallbacks import fell_back
from alignedserve.kernels.common.failing import guard, replaced
from alignedserve.kernels.common.int8_kv import KEPT_IN_INT8
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.probing import KERNELS, broken, replace, working_libraries
from alignedserve.kernels.library import DTYPES, Library, NoLibrary, lacked_set
from alignedserve.kernels.native.kernels import Native

Kernels: TypeAlias = Reference  # of a device: the reference, or kernels that do some or all of it faster


@dataclass(frozen=True)
class KernelChoice:
    kernels: Kernels
    why: str


def choose(
    device: torch.device, dtype: torch.dtype, isa: str | None = None, *, block_size: int | None = None
) -> KernelChoice:
    """Return the kernels for a device and dtype.

    `isa` names an instruction set of the C++ kernels, or "reference"; `block_size` is the cache's, where the kernels
    are used for attention. A cache of int8 is copied like any other: bytes are moved, not numbers.
    """
    if dtype is KEPT_IN_INT8:
        dtype = torch.bfloat16
    if isa == "reference":
        return KernelChoice(Reference(), "asked for")
    if device.type == "cuda":
        return _for_cuda(device, dtype, block_size)
    if device.type != "cpu":
        return KernelChoice(Reference(), f"there are no kernels of our own for {device.type}")
    if dtype not in DTYPES:
        return KernelChoice(Reference(), f"the C++ kernels do not know {dtype}")
    try:
        library = Library(isa)
    except NoLibrary as reason:
        if isa is None:
            fell_back("C++ kernels", str(reason), f"{Reference.name} takes their place")
        return KernelChoice(Reference(), str(reason))
    if isa is None and (lacked := lacked_set()):
        why = "they were built for another CPU: `python -m alignedserve.kernels.build` builds them for this one"
        fell_back(f"C++ kernels for {lacked}", why, f"those for {library.isa} take their place")
    return KernelChoice(Native(library), "asked for" if isa else f"the best of {library.usable} that this CPU runs")


@cache
def _for_cuda(device: torch.device, dtype: torch.dtype, block_size: int | None) -> KernelChoice:
    if dtype not in DTYPES:
        return _without_triton(f"the Triton kernels do not know {dtype}")
    try:
        from alignedserve.kernels.dispatch.paged_attention import PagedKernels
        from alignedserve.kernels.triton.kernels import TritonKernels
    except ImportError as error:
        return _without_triton(f"Triton cannot be imported: {error}")
    faults = _broken(device, dtype)
    libraries, why_not = working_libraries(device, dtype, block_size)
    kernels = PagedKernels(libraries) if libraries else TritonKernels()
    for name, why in faults.items():
        replaced(name, why)
    replace(kernels, faults)
    guard(kernels, KERNELS - faults.keys(), device)
    listed = "; ".join(f"{name} ({why})" for name, why in faults.items())
    works = f"torch does in their place what does not work here: {listed}" if faults else "all work"
    return KernelChoice(kernels, "; ".join((f"on {torch.cuda.get_device_name(device)} {works}", *why_not)))


def _without_triton(why: str) -> KernelChoice:
    fell_back("Triton kernels", why, f"{Reference.name} takes their place")
    return KernelChoice(Reference(), why)


@cache
def _broken(device: torch.device, dtype: torch.dtype) -> Mapping[str, str]:
    """Return the Triton kernels that fail, with the reason; each is tried once per process. Speed is not measured."""
    from alignedserve.kernels.triton.kernels import TritonKernels
    from alignedserve.kernels.triton.launch import with_choice

    with with_choice(0):
        return broken(TritonKernels(), device, dtype)
