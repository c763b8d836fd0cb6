"""Which kernels run: the fastest that this device, dtype and installation have, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from alignedserve.kernels.common.decoder import Decoder, DecoderLayer
from alignedserve.kernels.common.drawing import Likeliest, Wish
from alignedserve.kernels.common.failing import guard
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.spans import Spans
from alignedserve.kernels.dispatch.probing import KERNELS, broken, replace, working_libraries
from alignedserve.kernels.library import DTYPES, Library, NoLibrary
from alignedserve.kernels.native.kernels import Native


class Kernels(Protocol):
    """What each method means stands in reference.py. Tensors may be strided in all but their last dimension."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str:
        """The name, and what tells these from those of another build."""

    @property
    def captures(self) -> bool: ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear: ...

    def decoder(self, layers: Sequence[DecoderLayer]) -> Decoder | None:
        """Runs them all in one call; None where there is none that can."""

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

    def draw(self, logits: torch.Tensor, wishes: Sequence[Wish], numbers: Sequence[float]) -> torch.Tensor: ...

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> Likeliest: ...

    def gather(self, cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None: ...

    def scatter(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None: ...

    def quantise(self, rows: torch.Tensor, q: torch.Tensor, least: torch.Tensor, step: torch.Tensor) -> None: ...

    def dequantise(self, q: torch.Tensor, least: torch.Tensor, step: torch.Tensor, out: torch.Tensor) -> None: ...

    def expand(
        self, cache: torch.Tensor, slots: torch.Tensor, q: torch.Tensor, least: torch.Tensor, step: torch.Tensor
    ) -> None: ...


@dataclass(frozen=True)
class Choice:
    kernels: Kernels
    why: str


def choose(
    device: torch.device, dtype: torch.dtype, isa: str | None = None, *, block_size: int | None = None
) -> Choice:
    """`isa` names an instruction set of the C++ kernels, or "reference"; `block_size` is that of the cache they are to
    attend to, if they are."""
    if isa == "reference":
        return Choice(Reference(), "asked for")
    if device.type == "cuda":
        return _for_cuda(device, dtype, block_size)
    if device.type != "cpu":
        return Choice(Reference(), f"there are no kernels of our own for {device.type}")
    if dtype not in DTYPES:
        return Choice(Reference(), f"the C++ kernels do not know {dtype}")
    try:
        library = Library(isa)
    except NoLibrary as reason:
        return Choice(Reference(), str(reason))
    return Choice(Native(library), "asked for" if isa else f"the best of {library.usable} that this CPU runs")


@cache
def _for_cuda(device: torch.device, dtype: torch.dtype, block_size: int | None) -> Choice:
    if dtype not in DTYPES:
        return Choice(Reference(), f"the Triton kernels do not know {dtype}")
    try:
        from alignedserve.kernels.dispatch.paged_attention import PagedKernels
        from alignedserve.kernels.triton.kernels import TritonKernels
    except ImportError as error:
        return Choice(Reference(), f"Triton cannot be imported: {error}")
    faults = _broken(device, dtype)
    libraries, why_not = working_libraries(device, dtype, block_size)
    kernels = PagedKernels(libraries) if libraries else TritonKernels()
    replace(kernels, faults)
    guard(kernels, KERNELS - faults.keys(), device)
    listed = "; ".join(f"{name} ({why})" for name, why in faults.items())
    works = f"torch does in their place what does not work here: {listed}" if faults else "all work"
    return Choice(kernels, "; ".join((f"on {torch.cuda.get_device_name(device)} {works}", *why_not)))


@cache
def _broken(device: torch.device, dtype: torch.dtype) -> Mapping[str, str]:
    """Tried once in a process: each of the Triton kernels by itself. How fast they are on so little is no matter."""
    from alignedserve.kernels.triton.kernels import TritonKernels
    from alignedserve.kernels.triton.launch import with_choice

    with with_choice(0):
        return broken(TritonKernels(), device, dtype)
