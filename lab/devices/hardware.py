"""The hardware of a simulated worker: how long its steps and copies take, and how much memory it has.

This is the simulator's truth, and not what the cores believe: they start with a profile of it, as a real worker does,
and learn from the steps that they see.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from math import log
from pathlib import Path
from typing import Protocol

from alignedserve.core import FoldKv, StepPlan, WorkerLimits
from alignedserve.cost import profile as cost_profile
from alignedserve.cost.fit import OnlineCost, Point
from alignedserve.cost.model import CostModel, Link, Route, Shape, shape_of
from alignedserve.cost.model import Kind as CostKind
from alignedserve.cost.sums import added
from alignedserve.cost.trials import Bounds, trials
from alignedserve.errors import ProfileError
from alignedserve.lab.devices import device_file, devices, gpu_truth, roofline
from alignedserve.lab.devices.devices import Device
from alignedserve.lab.devices.gpu_truth import GpuTruth
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, SendKv
from alignedserve.protocol.extents import Extents, PageBytes, PageKind
from alignedserve.protocol.form_orders import CompressPage, CopySlots, ProjectKv
from alignedserve.protocol.int8_layout import Int8Layout
from alignedserve.scheduling.form_rules import Compression
from alignedserve.scheduling.policy import Policy

_GB = 1e9
_HOST = 5e-6  # seconds before a copy begins
_BLOCK, _PAGE = 16, 64  # tokens
_BF16 = 2  # bytes
_COMPRESSED = 2.3 * _GB  # bytes of KV that a core compresses in a second beside a worker's steps, on a Zen 4
_INT8_OVER_PCIE = 8 / 15  # share of KV's bytes; a GPU turns int8 into KV much faster than int8 arrives
_INT8_ON_CPU = 2.5  # times as long as KV, where the core that copies int8 also turns it into KV
_UNKNOWN, _MOST_OFF = 1.0, 0.9  # errors, as shares: of a kind that was not measured; the largest error of any step
_P50, _P90_LOG = log(2), log(log(10) / log(2))  # of the Weibull distribution


class Truth(Hashable, Protocol):
    """The time that a step really takes."""

    def seconds(self, plan: StepPlan) -> float: ...

    def seconds_of(self, chunks: Sequence[tuple[int, int]], prefixes: Sequence[int]) -> float:
        """Return the time of a step of chunks (length, cached) and of decodes with these prefixes."""

    def hidden_token_s(self) -> float:
        """Return the time to compute K and V of a token from its hidden vectors."""


_LAYERS = 16  # of a model whose steps were measured on a CPU: profiles do not say
_NETWORK = Link(bandwidth=25 * _GB, latency_s=2e-5)  # 200 Gbit/s


@dataclass(frozen=True, eq=False)
class Hardware:
    """The hardware of one worker, and the links that it copies over."""

    name: str
    truth: Truth
    kv_tokens: int  # tokens that its device cache holds
    kv_bytes: int  # of a token
    links: Mapping[Route, Link] = field(default_factory=dict)
    measured: WorkerLimits | None = None  # limits of the worker whose profile this is
    int8_in: float = 1.0  # time that a page in int8 takes to the device and to become KV, as a share of KV's time
    extents: Extents | None = None  # of the pool, where it has pages of more than one kind
    gpus: int = 1  # that share the model
    copies_beside: bool = False  # whether copies from the pool go on beside steps (executor/building.py)
    layers: int = 0  # between which a step can pause (decode_worker/pausing.py): on a CPU

    def step(self, plan: StepPlan) -> float:
        return self.truth.seconds(plan)

    def work(self, command: Command) -> float:
        """Return the time of a copy, or of other work that is no step; copies on the device itself take next to
        nothing. A device measured alone sends through host memory."""
        match command:
            case CopyOut(tokens=tokens, start=start):
                return self.links[Route.DEVICE_TO_ARENA].seconds((len(tokens) - start) * self.kv_bytes)
            case CopyIn():
                return self.links[Route.ARENA_TO_DEVICE].seconds(self._bytes_in(command))
            case CopySlots(checkpoints=saved, restores=restored):
                copies = ((Route.DEVICE_TO_ARENA, saved), (Route.ARENA_TO_DEVICE, restored))
                return added(self.links[route].seconds(len(slots) * self.kv_bytes) for route, slots in copies if slots)
            case FoldKv():
                return 0.0
            case ProjectKv():
                return self.truth.hidden_token_s() * command.num_tokens
            case CompressPage():
                return self.page_size * self.kv_bytes / _COMPRESSED
            case SendKv():
                link = self.links.get(Route.DEVICE_TO_DEVICE) or self.links[Route.DEVICE_TO_ARENA]
                return link.seconds(len(command.tokens) * self.kv_bytes)
        raise TypeError(f"a worker cannot begin {command}")

    def _bytes_in(self, command: CopyIn) -> int:
        kv_bytes = (len(command.tokens) - command.start) * self.kv_bytes
        if self.extents is not None:
            num_int8 = sum(self.extents.kind_of(page) is PageKind.KV_INT8 for page in command.pages)
            kv_bytes -= round((1 - self.int8_in) * num_int8 * self.page_size * self.kv_bytes)
        return kv_bytes

    @property
    def page_size(self) -> int:
        """Return the number of tokens in a page."""
        return self.measured.page_size if self.measured else _PAGE

    def divided(self, pages: int, policy: Policy) -> Hardware:
        """Return the hardware with a pool of this many pages, divided as the policy keeps them."""
        if policy.compression is Compression.OFF:
            return self
        return replace(self, extents=self._page_bytes.divide(pages))

    @property
    def _page_bytes(self) -> PageBytes:
        channels = self.kv_bytes // _BF16
        return PageBytes(self.page_size * self.kv_bytes, Int8Layout(channels, self.page_size).size)

    def limits(self, step_tokens: int, batch: int) -> WorkerLimits:
        """Return the limits of a worker on this hardware: the measured limits, or else limits with these numbers."""
        return self.measured or WorkerLimits(self.kv_tokens // _BLOCK, _BLOCK, _PAGE, step_tokens, batch)


@cache
def from_gpu(name: str) -> Hardware:
    """Build the hardware of a GPU and a model that users name: measured, or else computed by the roofline."""
    if name in gpu_truth.names():
        truth = gpu_truth.load(name)
        return _of_device(name, device_file.described(truth.about), truth)
    device = devices.named(name)
    if device is None:
        raise ProfileError(f"there is no device {name!r:.60}: name one {devices.HOW_NAMED}")
    return _of_device(name, device, GpuTruth(roofline.profile(device)))


def from_file(path: Path, seed: int = 0) -> Hardware:
    """Build the hardware that a file describes: by numbers, by grids, or as `alignedserve profile` wrote it."""
    tree = device_file.read(path)
    if "gpu" not in tree and "about" not in tree:
        return from_profile(path, seed)
    try:
        device = device_file.described(tree.get("about", tree))
        grids = device_file.grids(tree, device) if "about" in tree else roofline.profile(device)
        return _of_device(path.stem, device, GpuTruth(grids))
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"{path} is a broken profile ({type(error).__name__}: {error})") from None


def _of_device(name: str, device: Device, truth: Truth) -> Hardware:
    """Return the hardware of GPUs that share a model: tensor-parallel ranks share the weights, and split K and V."""
    gpu, ranks = device.gpu, device.ranks
    pcie = Link(ranks * gpu.pcie_gb_s * _GB, _HOST)
    peer = pcie if gpu.nvlink_gb_s is None else Link(ranks * gpu.nvlink_gb_s * _GB, _HOST)
    links = {
        Route.ARENA_TO_DEVICE: pcie,
        Route.DEVICE_TO_ARENA: pcie,
        Route.DEVICE_TO_DEVICE: peer,
        Route.NETWORK: _NETWORK,
    }
    kv_tokens, kv_bytes, beside = device.kv_tokens, device.kv_bytes, ranks == 1
    return Hardware(name, truth, kv_tokens, kv_bytes, links, None, _INT8_OVER_PCIE, gpus=ranks, copies_beside=beside)


class ProfileTruth:
    """A device whose steps take the time of a recorded profile's cost model, with an error as large as the profile's.

    The profile has the median and the 90th percentile of the model's error, for each kind of step. The error of a step
    is drawn from the Weibull distribution with these two, to either side. The draw follows from the seed, the step's
    number and its shape, so a repeated run is the same. Trials, which workers start with, are medians without error.
    """

    def __init__(self, model: CostModel, seed: int = 0) -> None:
        self._model, self._seed = model, seed

    def seconds(self, plan: StepPlan) -> float:
        shape = shape_of(plan)
        return self._model.seconds(shape) * (1 + self._off_by(plan.number, shape))

    def _off_by(self, number: int, shape: Shape) -> float:
        known = self._model.uncertainty[shape.kind]
        if not 0 < known.median < _UNKNOWN:
            return 0.0
        bits = int.from_bytes(blake2b(f"{self._seed} {number} {shape}".encode(), digest_size=8).digest(), "big")
        share = (bits >> 11) / (1 << 53)  # the lowest bit, which is not used here, chooses the side
        spread = log(max(1.0, known.p90 / known.median)) / _P90_LOG
        size: float = known.median * (-log(1 - share) / _P50) ** spread
        return min(size, _MOST_OFF) * (1 if bits & 1 else -1)

    def seconds_of(self, chunks: Sequence[tuple[int, int]], prefixes: Sequence[int]) -> float:
        return self._model.seconds(Shape.build(chunks, prefixes))

    def hidden_token_s(self) -> float:
        return self._model.coefficients[CostKind.DECODE].remade


def from_profile(path: Path, seed: int = 0) -> Hardware:
    """Build the hardware of a device that `alignedserve profile` has measured; the seed draws its steps' errors."""
    profile = cost_profile.load(path)
    missing = {Route.ARENA_TO_DEVICE, Route.DEVICE_TO_ARENA} - set(profile.links)
    if missing:
        raise ProfileError(f"{path} has no measured copies: write it again with `alignedserve profile`")
    limits, kv_bytes = profile.memory.limits, profile.memory.kv_bytes
    kv_tokens = limits.num_blocks * limits.block_size
    truth, links, subject = ProfileTruth(profile.model, seed), profile.links, profile.subject
    int8_in = _INT8_ON_CPU if subject.is_processor else _INT8_OVER_PCIE
    beside = not subject.is_processor and subject.tensor_parallel == 1
    gpus = subject.tensor_parallel
    of = subject.device, truth, kv_tokens, kv_bytes, links, limits, int8_in, None, gpus, beside
    return Hardware(*of, layers=_LAYERS if subject.is_processor and gpus == 1 else 0)


def belief(truth: Truth, limits: WorkerLimits, longest: int) -> OnlineCost:
    """Return the cost model that a worker starts with, fitted to trials on its device, as real workers run them."""
    return _profiled(truth, limits, longest).copy()


@cache
def _profiled(truth: Truth, limits: WorkerLimits, longest: int) -> OnlineCost:
    steps = trials(Bounds(limits, longest))
    points = [Point(step.shape, truth.seconds_of(step.chunks, step.prefixes)) for step in steps]
    return OnlineCost(points, truth.hidden_token_s())
