"""Choose the kernels that run: the fastest for this device, dtype and installation, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from alignedserve.kernels.common.decoder import Decoder, DecoderLayer
from alignedserve.kernels.common.drawing import DrawWish, Likeliest
from alignedserve.kernels.common.failing import guard
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.spans import Spans
from alignedserve.kernels.dispatch.probing import KERNELS, broken, replace, working_libraries
from alignedserve.kernels.library import DTYPES, Library, NoLibrary
from alignedserve.kernels.native.kernels import Native


class Kernels(Protocol):
    """The kernels of a device; reference.py defines each method. Tensors may be strided but in the last dimension."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str:
        """Return the name, and what distinguishes these kernels from another build."""

    @property
    def captures(self) -> bool: ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear: ...

    def decoder(self, layers: Sequence[DecoderLayer]) -> Decoder | None:
        """Return a decoder that runs all layers in one call, or None where these kernels have none."""

    def write(self, cache: torch.Tensor, spans: Spans, k: torch.Tensor, v: torch.Tensor) -> None: ...

    def attend(
        self, query: torch.Tensor, cache: torch.Tensor, spans: Spans, scale: float, window: int | None = None
    ) -> torch.Tensor: ...

    def write_hidden(self, cache: torch.Tensor, slots: torch.Tensor, vectors: torch.Tensor) -> None: ...

    def read_hidden(self, cache: torch.Tensor, slots: torch.Tensor, hidden_size: int) -> torch.Tensor: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor: ...

    def add_layer_norm(
        self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor: ...

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def draw(self, logits: torch.Tensor, wishes: Sequence[DrawWish], numbers: Sequence[float]) -> torch.Tensor: ...

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> Likeliest: ...

    def gather(self, cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None: ...

    def scatter(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None: ...

    def quantise(self, rows: torch.Tensor, q: torch.Tensor, least: torch.Tensor, step: torch.Tensor) -> None: ...

    def dequantise(self, q: torch.Tensor, least: torch.Tensor, step: torch.Tensor, out: torch.Tensor) -> None: ...

    def expand(
        self, cache: torch.Tensor, slots: torch.Tensor, q: torch.Tensor, least: torch.Tensor, step: torch.Tensor
    ) -> None: ...


@dataclass(frozen=True)
class KernelChoice:
    kernels: Kernels
    why: str


def choose(
    device: torch.device, dtype: torch.dtype, isa: str | None = None, *, block_size: int | None = None
) -> KernelChoice:
    """Return the kernels for a device and dtype.

    `isa` names an instruction set of the C++ kernels, or "reference"; `block_size` is the cache's, where the kernels
    are used for attention.
    """
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
        return KernelChoice(Reference(), str(reason))
    return KernelChoice(Native(library), "asked for" if isa else f"the best of {library.usable} that this CPU runs")


@cache
def _for_cuda(device: torch.device, dtype: torch.dtype, block_size: int | None) -> KernelChoice:
    if dtype not in DTYPES:
        return KernelChoice(Reference(), f"the Triton kernels do not know {dtype}")
    try:
        from alignedserve.kernels.dispatch.paged_attention import PagedKernels
        from alignedserve.kernels.triton.kernels import TritonKernels
    except ImportError as error:
        return KernelChoice(Reference(), f"Triton cannot be imported: {error}")
    faults = _broken(device, dtype)
    libraries, why_not = working_libraries(device, dtype, block_size)
    kernels = PagedKernels(libraries) if libraries else TritonKernels()
    replace(kernels, faults)
    guard(kernels, KERNELS - faults.keys(), device)
    listed = "; ".join(f"{name} ({why})" for name, why in faults.items())
    works = f"torch does in their place what does not work here: {listed}" if faults else "all work"
    return KernelChoice(kernels, "; ".join((f"on {torch.cuda.get_device_name(device)} {works}", *why_not)))


@cache
def _broken(device: torch.device, dtype: torch.dtype) -> Mapping[str, str]:
    """Return the Triton kernels that fail, with the reason; each is tried once per process. Speed is not measured."""
    from alignedserve.kernels.triton.kernels import TritonKernels
    from alignedserve.kernels.triton.launch import with_choice

    with with_choice(0):
        return broken(TritonKernels(), device, dtype)
