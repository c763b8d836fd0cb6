"""Choose the workers of each kind, and how many GPUs share a model, from what nodes have: `topology: auto`.

    GPUs of a worker    the fewest beside whose weights KV of 16 chats of 2,048 tokens has room
    workers             as many as there are GPUs for; on CPUs one on each node
    kinds               all run prompts and decodes (colocated), unless a gap between tokens was promised (slo.tbt_ms)
                        of which decodes alone take more than half: then half of each node's workers run prompts

Example: two nodes with four H100 each serve an 8B. Its 16 GB of weights leave a GPU room for 400,000 tokens, so each
worker has a GPU. Read at 3.35 TB/s they take 4.8 ms, and a step of many decodes takes 2.8 times as long, 13 ms. Where
25 ms were promised, 4+4 leave each node two workers for prompts; where nothing was, 8xcolocated serve more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.config.choices import TransportName
from alignedserve.config.config import Config
from alignedserve.config.topology import Topology
from alignedserve.core import Role
from alignedserve.errors import AlignedServeError
from alignedserve.launch.preflight import NO_GPUS, GpuOffer
from alignedserve.sizing.sizes import USUAL_TOKENS, on_gpu

_LEAST_TOKENS = 16 * USUAL_TOKENS
_RANKS = (1, 2, 4, 8)
_LOADED = 2.8  # a step of 128 decodes, in times of reading the weights: 13.6 ms of 4.8 on an H100 (docs/guides/gpus.md)
_MOST_OF_GAP = 0.5  # that decodes take where prompts run beside them
_GB = 10**9


@dataclass(frozen=True)
class NodeOffer:
    """What a node offers workers."""

    name: str
    cpus: float = math.inf
    gpus: float = 0.0
    gpu: GpuOffer = NO_GPUS
    named: Mapping[Role, int] = field(default_factory=dict)  # workers of each kind, where its resources say so


def choose(
    config: Config, nodes: Sequence[NodeOffer], model: ModelConfig, folder: Path
) -> tuple[Config, tuple[str, ...]]:
    """Return the config with a topology and ranks, and three lines: the choice, what it rests on, how to pin it."""
    if not config.topology.is_auto:
        return config, ()
    config, about_model = _with_ranks(config, nodes, model, folder)
    shares, why = [_workers(config, node) for node in nodes], "the nodes' resources name these roles"
    prefill, decode = (sum(share[number] for share in shares) for number in range(2))
    if not any(node.named for node in nodes):
        why, is_parted = _kinds(config, nodes, [num for _, num in shares if num], model, folder)
        prefill, decode = (decode // 2, decode - decode // 2) if is_parted else (0, decode)
    config = replace(config, topology=Topology(prefill, max(1, decode)))
    return config, (
        f"topology: {config.topology}: {why}",
        f"each worker: {about_model}",
        f"to pin this: topology: {config.topology}, engine.tensor_parallel_size: {config.engine.tensor_parallel_size}",
    )


def _with_ranks(config: Config, nodes: Sequence[NodeOffer], model: ModelConfig, folder: Path) -> tuple[Config, str]:
    """Return the config with as many ranks as the model needs, at least those that were asked for, and why."""
    least = min((size for node in nodes if node.gpus and (size := node.gpu.total_bytes)), default=None)
    ranks = config.engine.tensor_parallel_size
    if not config.engine.on_gpu:
        return config, "the cores of its node: no GPU is used"
    if least is None:
        return config, f"{_gpus(ranks)}: no driver tells how large GPUs are"
    most, found = max(int(node.gpus) for node in nodes), config
    for number in (each for each in _RANKS if ranks <= each <= max(most, ranks)):
        with suppress(AlignedServeError):  # the model cannot be divided by it
            found = replace(config, engine=replace(config.engine, tensor_parallel_size=number))
            weights, tokens = on_gpu(found, model, folder, least)
            if tokens >= max(_LEAST_TOKENS, config.engine.max_model_len or 0):
                beside = f"{weights / _GB:.1f} GB of weights leave {tokens:,} tokens of KV"
                return found, f"{_gpus(number)}: {beside} on each of {least / _GB:.0f} GB"
    number = found.engine.tensor_parallel_size
    return found, f"{_gpus(number)}, as many as a node has and the model allows: there is little room for KV"


def _gpus(ranks: int) -> str:
    return "a GPU" if ranks == 1 else f"{ranks} GPUs"


def _workers(config: Config, node: NodeOffer) -> tuple[int, int]:
    """Return how many workers the node takes: prefill workers, where its resources name some, and others."""
    ranks, each = config.engine.tensor_parallel_size, config.ray.gpus_per_worker or 1.0
    most = int(min(node.cpus, node.gpus / each)) // ranks if config.engine.on_gpu else int(node.cpus >= ranks)
    if not node.named:
        return 0, most
    most = most if config.engine.on_gpu else int(min(node.cpus, 1 << 10)) // ranks
    decode = min(most, node.named.get(Role.DECODE, 0))
    return min(most - decode, node.named.get(Role.PREFILL, 0)), decode


def _kinds(
    config: Config, nodes: Sequence[NodeOffer], workers: Sequence[int], model: ModelConfig, folder: Path
) -> tuple[str, bool]:
    """Return why workers are of one kind or two, and whether they are of two."""
    alike = "all run prompts and decodes, since"
    if config.transport not in (TransportName.AUTO, TransportName.HOST) and sum(workers) > 1:
        return f"prompts run apart, since transport {config.transport.value} is between two kinds of workers", True
    if config.slo.tbt_ms is None:
        return f"{alike} no gap between tokens was promised (slo.tbt_ms)", False
    bandwidth = min((node.gpu.bandwidth for node in nodes if node.gpus), default=0.0)
    if not config.engine.on_gpu or not bandwidth:
        return f"{alike} nothing tells how long decodes take on these devices", False
    weights, _ = on_gpu(config, model, folder, None)
    step_ms, asked = 1e3 * _LOADED * weights / bandwidth, f"the {config.slo.tbt_ms:g} ms of slo.tbt_ms"
    if step_ms <= _MOST_OF_GAP * config.slo.tbt_ms:
        return f"{alike} steps of decodes take about {step_ms:.0f} of {asked}", False
    if any(num == 1 for num in workers):
        return f"{alike} a node has one worker, though steps of decodes take about {step_ms:.0f} of {asked}", False
    return f"prompts run apart, since steps of decodes take about {step_ms:.0f} of {asked}", True
