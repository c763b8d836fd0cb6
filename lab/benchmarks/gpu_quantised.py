"""Measure the engine on a GPU with quantised weights against itself in bf16, on random weights of real shapes.

    python -m lab.benchmarks.gpu_quantised                      # all kinds, of the 8B

Decode is of captured steps that each begin before the step before is read, after prompts of 64 tokens, so that weights
are nearly all that is read. `fp8` is what a folder of 8-bit floats with a scale for each output takes: its head stays
bf16. Shares are of a copy within the device, in the same run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum

import torch

from alignedserve.architectures.quantization import Quantization
from alignedserve.engine.weights.dummy import DummyWeights
from alignedserve.engine.weights.tensors import Cut
from alignedserve.kernels.common.fp8 import AnyQuantised, fp8_weight, why_none
from alignedserve.lab.benchmarks.common.gpu_shapes import DEVICE, Model, all_tried, asked, left_out
from alignedserve.lab.benchmarks.common.report import report
from alignedserve.lab.benchmarks.gpu import Bench

BATCHES, PREFIX, PROMPTS = (1, 8, 64), 64, (512, 2048)
PARTS = ("engine",)


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


def main() -> int:
    parts, model = asked(__doc__, "gpu_quantised", PARTS)
    kinds, why = list(Kind), why_none(DEVICE, torch.bfloat16)
    if why is not None:
        left_out("fp8", why)
        kinds.remove(Kind.FP8)
    return 0 if all_tried(parts, lambda _: of_engines(model, kinds)) else 1


if __name__ == "__main__":
    sys.exit(main())
