"""What a simulated worker is made of: how long its steps and copies take, and how much memory it has.

This is the simulator's truth. What the cores believe is apart from it: they start with a profile of it, as a real
worker does, and learn from the steps that they see.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from alignedserve import cost_profile
from alignedserve.core import StepPlan
from alignedserve.cost import CostModel, Link, Route, Shape
from alignedserve.cost_fit import OnlineCost, Point
from alignedserve.cost_trials import Bounds, trials
from alignedserve.errors import ProfileError
from alignedserve.messages import CopyIn, CopyOut
from alignedserve.running import WorkerLimits
from alignedserve.simulator import gpu_truth

_GB = 1e9
_SHARE = 0.9  # of a GPU's memory that is used (vLLM's default)
_HOST = 5e-6  # seconds before a copy begins
_BLOCK, _PAGE = 16, 64  # tokens


class Truth(Hashable, Protocol):
    """How long a step takes."""

    def seconds(self, plan: StepPlan) -> float: ...

    def seconds_of(self, chunks: Sequence[tuple[int, int]], prefixes: Sequence[int]) -> float:
        """Of chunks (length, cached) and decodes."""


@dataclass(frozen=True)
class Gpu:
    memory_gb: float
    pcie_gb_s: float  # one way, as copies reach it
    nvlink_gb_s: float | None  # None: to another GPU over PCIe


@dataclass(frozen=True)
class ModelSize:
    weights_gb: float  # bf16
    kv_bytes: int  # of a token, in all layers


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "RTX PRO 6000": Gpu(memory_gb=96, pcie_gb_s=50, nvlink_gb_s=None),
        "RTX 4090": Gpu(memory_gb=24, pcie_gb_s=25, nvlink_gb_s=None),
    }
)
MODELS: Mapping[str, ModelSize] = MappingProxyType(
    {
        "Llama-3.1-8B": ModelSize(weights_gb=16.06, kv_bytes=2 * 2 * 32 * 8 * 128),
        "Qwen3-32B": ModelSize(weights_gb=65.5, kv_bytes=2 * 2 * 64 * 8 * 128),
    }
)
_NETWORK = Link(bandwidth=25 * _GB, latency_s=2e-5)  # 200 Gbit/s


@dataclass(frozen=True, eq=False)
class Hardware:
    """Of one worker."""

    name: str
    truth: Truth
    kv_tokens: int  # that its device cache holds
    kv_bytes: int  # of a token
    links: Mapping[Route, Link] = field(default_factory=dict)
    measured: WorkerLimits | None = None  # of the very worker that was measured

    def step(self, plan: StepPlan) -> float:
        return self.truth.seconds(plan)

    def copy_out(self, command: CopyOut) -> float:
        return self.links[Route.DEVICE_TO_ARENA].seconds(len(command.tokens) * self.kv_bytes)

    def copy_in(self, command: CopyIn) -> float:
        return self.links[Route.ARENA_TO_DEVICE].seconds(len(command.tokens) * self.kv_bytes)

    def limits(self, step_tokens: int, batch: int) -> WorkerLimits:
        """Of a worker on it, with these where it does not bring its own."""
        return self.measured or WorkerLimits(self.kv_tokens // _BLOCK, _BLOCK, _PAGE, step_tokens, batch)


@cache
def of_gpu(name: str) -> Hardware:
    """A measured GPU and model; its tensor-parallel ranks share the weights, and each has its part of K and V."""
    truth = gpu_truth.load(name)
    gpu, model, ranks = GPUS[truth.about["gpu"]], MODELS[truth.about["model"]], truth.about["tensor_parallel"]
    room_gb = _SHARE * ranks * gpu.memory_gb - model.weights_gb
    pcie = Link(ranks * gpu.pcie_gb_s * _GB, _HOST)
    peer = pcie if gpu.nvlink_gb_s is None else Link(ranks * gpu.nvlink_gb_s * _GB, _HOST)
    links = {
        Route.ARENA_TO_DEVICE: pcie,
        Route.DEVICE_TO_ARENA: pcie,
        Route.DEVICE_TO_DEVICE: peer,
        Route.NETWORK: _NETWORK,
    }
    return Hardware(name, truth, int(room_gb * _GB / model.kv_bytes), model.kv_bytes, links)


class ProfileTruth:
    """A device that takes exactly what the cost model of a recorded profile says."""

    def __init__(self, model: CostModel) -> None:
        self._model = model

    def seconds(self, plan: StepPlan) -> float:
        return self._model.plan_seconds(plan)

    def seconds_of(self, chunks: Sequence[tuple[int, int]], prefixes: Sequence[int]) -> float:
        return self._model.seconds(Shape.of(chunks, prefixes))


def of_profile(path: Path) -> Hardware:
    """A device that `alignedserve profile` has measured."""
    profile = cost_profile.load(path)
    missing = {Route.ARENA_TO_DEVICE, Route.DEVICE_TO_ARENA} - set(profile.transfers.links)
    if missing:
        raise ProfileError(f"{path} has no measured copies: write it anew with `alignedserve profile`")
    limits, kv_bytes = profile.memory.limits, profile.memory.kv_bytes
    kv_tokens = limits.num_pairs * limits.block_size
    truth, links = ProfileTruth(profile.model), profile.transfers.links
    return Hardware(profile.subject.device, truth, kv_tokens, kv_bytes, links, limits)


def belief(truth: Truth, limits: WorkerLimits, longest: int) -> OnlineCost:
    """What a worker knows when it starts: steps measured on its device, as real workers measure them."""
    return deepcopy(_profiled(truth, limits, longest))


@cache
def _profiled(truth: Truth, limits: WorkerLimits, longest: int) -> OnlineCost:
    wanted = trials(Bounds(limits, longest))
    return OnlineCost([Point(one.shape, truth.seconds_of(one.chunks, one.prefixes)) for one in wanted])
