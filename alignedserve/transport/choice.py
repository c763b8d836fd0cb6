"""Which transport a worker uses, and why: of what is asked for, and of what is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from alignedserve.config.config import Config, TransportName
from alignedserve.engine.device.groups import why_no_gloo, why_no_nccl
from alignedserve.errors import TransportError


@dataclass(frozen=True, slots=True)
class Means:
    """What this worker has to send with; of each, why it cannot be used, or None."""

    device: str  # where its KV is: cpu, cuda
    no_collective: str | None
    no_ipc: str | None
    no_reach: str | None = None  # why the GPUs do not reach each other's memory, by which `collective` gains something


class Chosen(NamedTuple):
    name: TransportName
    why: str


def means_of(device: torch.device, config: Config) -> Means:
    """All workers of a deployment come to the same: they have the same configuration, and see the same GPUs."""
    if device.type == "cpu":
        return Means("cpu", why_no_gloo(), why_no_gloo())
    return _means_of_gpus(device.type, torch.cuda.device_count(), config)


def _means_of_gpus(device: str, num_gpus: int, config: Config) -> Means:
    """`num_gpus` are those that a worker sees: under a launcher that gives each its own, one."""
    ranks, topology = config.engine.tensor_parallel_size, config.topology
    workers = ranks * (topology.prefill_workers + topology.decode_workers)
    if config.ray.address is not None:
        is_part = 0 < config.ray.gpus_per_worker < 1
        return Means(
            *(device, _nccl_on("Ray may put two workers on one GPU (ray.gpus_per_worker)" if is_part else None)),
            no_ipc="on a Ray cluster workers need not be on one GPU",
            no_reach="on a Ray cluster nobody knows beforehand which GPUs reach each other",
        )
    shared = f"{workers} worker processes share {num_gpus} GPUs" if workers > num_gpus else None
    several = f"it is between processes on one GPU, and there are {num_gpus}: CUDA_VISIBLE_DEVICES=0 leaves one"
    return Means(device, _nccl_on(shared), why_no_gloo() or (several if num_gpus > 1 else None), _no_reach(num_gpus))


def _nccl_on(shared: str | None) -> str | None:
    if (lack := why_no_nccl()) is not None or shared is None:
        return lack
    return f"NCCL refuses two processes on one GPU, and {shared}"


def _no_reach(num_gpus: int) -> str | None:
    for one in range(num_gpus):
        for other in range(num_gpus):
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} does not reach the memory of GPU {other}"
    return None


def choose(asked: TransportName, means: Means) -> Chosen:
    """TransportError where what is asked for cannot be."""
    if asked is TransportName.HOST:
        return Chosen(asked, "asked for")
    if asked is TransportName.AUTO:
        return _best(means)
    problem = means.no_ipc if asked is TransportName.IPC else means.no_collective
    if problem is not None:
        raise TransportError(f"transport {asked.value} cannot be used here: {problem}; auto and host can")
    return Chosen(asked, "asked for")


def _best(means: Means) -> Chosen:
    if means.device == "cpu":
        why = "KV is in the memory of the CPU, which the KV pool shares with all workers of a node"
        return Chosen(TransportName.HOST, why)
    if means.no_ipc is None:
        return Chosen(TransportName.IPC, "all workers are on one GPU")
    if means.no_collective is None and means.no_reach is None:
        return Chosen(TransportName.COLLECTIVE, "each worker has a GPU, and these reach each other's memory")
    return Chosen(TransportName.HOST, means.no_collective or means.no_reach or "nothing faster is there")
