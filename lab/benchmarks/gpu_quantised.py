"""Measure the engine on a GPU with quantised weights against itself in bf16, on random weights of real shapes.

    python -m lab.benchmarks.gpu_quantised                      # all kinds, of the 8B
    python -m lab.benchmarks.gpu_quantised --only layers        # single layers, no engine

Decode is of captured steps that each begin before the step before is read, after prompts of 64 tokens, so that weights
are nearly all that is read. `fp8` is what a folder of 8-bit floats with a scale for each output takes: its head stays
bf16. Shares are of a copy within the device, in the same run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from functools import partial

import torch

from alignedserve.architectures.quantization import GROUP, Quantization
from alignedserve.engine.weights.dummy import DummyWeights
from alignedserve.engine.weights.tensors import Cut
from alignedserve.kernels.common.fp8 import AnyQuantised, fp8_weight, why_none
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import quantised
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.lab.benchmarks.common.gpu_shapes import DEVICE, Model, all_tried, asked, left_out, seconds
from alignedserve.lab.benchmarks.common.report import report
from alignedserve.lab.benchmarks.gpu import Bench

BATCHES, PREFIX, PROMPTS = (1, 8, 64), 64, (512, 2048)
ROWS = (1, 8, 16, 64, 256, 2048)
PARTS = ("layers", "engine")


class Kind(str, Enum):
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"

    @property
    def quantization(self) -> Quantization:
        return Quantization.NONE if self is Kind.FP8 else Quantization(self.value)

    def read_bytes(self, model: Model) -> int:
        """Return the bytes of weights that a step reads."""
        head = model.vocabulary * model.hidden
        if self is Kind.FP8:
            return model.num_read - head + 2 * head
        return self.quantization.num_bytes(model.num_read - head, 0, head, 2)


class RandomFloats(DummyWeights):
    """Random weights of layers as 8-bit floats."""

    def quantised(self, layer: str, shape: tuple[int, int], cut: Cut | None = None) -> AnyQuantised | None:
        return None if layer == "lm_head" else fp8_weight(torch.randn(shape, device=DEVICE) * 0.02)


class QuantisedBench(Bench):
    def __init__(self, model: Model, kind: Kind) -> None:
        super().__init__(model)
        self.kind, self.quantization = kind, kind.quantization
        self.tensors = RandomFloats if kind is Kind.FP8 else DummyWeights

    @property
    def title(self) -> str:
        return f"{self.model.name}_{self.kind.value}"

    def rates(self) -> dict[str, float]:
        """Return the tokens per second of decodes and prompts."""
        found = dict[str, float]()
        for batch in BATCHES:
            took, _ = self.ahead(self.decodes([PREFIX] * batch))
            found[f"decode_{batch}"] = batch / took
            share = (self.kind.read_bytes(self.model) + batch * PREFIX * self.model.kv_bytes) / took / self.bandwidth
            report(f"{self.title}_decode_{batch}_bandwidth", share, "share")
        return found | {f"prompt_{tokens}": tokens / self.prompt_s(tokens) for tokens in PROMPTS}


def of_engines(model: Model, kinds: Sequence[Kind]) -> None:
    """Report each kind of weights, against bf16 where that is among the kinds: it comes first then."""
    plain = dict[str, float]()
    for kind in sorted(kinds, key=lambda kind: kind is not Kind.NONE):
        bench = QuantisedBench(model, kind)
        rates = bench.rates()
        plain = rates if kind is Kind.NONE else plain
        for name, rate in rates.items():
            report(f"{bench.title}_{name}", rate, "tokens/s", baseline=plain.get(name))
        bench.close()


def of_layers(model: Model, kinds: Sequence[Kind]) -> None:
    """Report single layers at several numbers of rows: what to look at where an engine is slower than hoped."""
    fused = model.heads * model.head_dim + 2 * model.kv_dim
    for out, inputs in ((fused, model.hidden), (2 * model.inner, model.hidden), (model.hidden, model.inner)):
        weight = torch.randn(out, inputs, device=DEVICE) * 0.02
        layers = {kind: layer_of(weight, kind) for kind in kinds}
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
            took = {kind: seconds(partial(layer, x)) for kind, layer in layers.items()}
            plain = took.get(Kind.NONE)
            for kind, taken in took.items():
                name = f"{model.name}_{out}x{inputs}_rows_{rows}_{kind.value}"
                report(name, taken * 1e6, "us", baseline=None if plain is None else plain * 1e6)


def layer_of(weight: torch.Tensor, kind: Kind) -> Linear:
    kernels = choose(DEVICE, torch.bfloat16).kernels
    bits = kind.quantization.bits
    if bits is not None:
        return kernels.quantised(quantised(weight, bits, GROUP), None, torch.bfloat16)
    return (
        kernels.fp8(fp8_weight(weight), None, torch.bfloat16) if kind is Kind.FP8 else kernels.linear(weight.bfloat16())
    )


def main() -> int:
    parts, model = asked(__doc__, "gpu_quantised", PARTS)
    kinds, why = list(Kind), why_none(DEVICE, torch.bfloat16)
    if why is not None:
        left_out("fp8", why)
        kinds.remove(Kind.FP8)
    measured = {"layers": of_layers, "engine": of_engines}
    return 0 if all_tried(parts, lambda part: measured[part](model, kinds)) else 1


if __name__ == "__main__":
    sys.exit(main())
