"""Choose and open the transport of a worker when it starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from alignedserve.config.choices import TransportName
from alignedserve.config.config import Config
from alignedserve.engine.device.groups import why_no_gloo, why_no_nccl
from alignedserve.engine.device.pace import CopyPace
from alignedserve.engine.device.ranks import Team
from alignedserve.errors import TransportError
from alignedserve.fallbacks import fell_back
from alignedserve.protocol.messages import holder
from alignedserve.shell.part import Place, lock_name
from alignedserve.transport.transport import ThroughTheArena, Transport


@dataclass(frozen=True, slots=True)
class Means:
    """The means of sending KV; for each the reason why it cannot be used, or None."""

    device: str  # where the KV is: cpu or cuda
    no_collective: str | None
    no_ipc: str | None
    no_reach: str | None = None  # why GPUs cannot reach each other's memory, which makes `collective` fast


class ChosenTransport(NamedTuple):
    name: TransportName
    why: str


def means_of(device: torch.device, config: Config) -> Means:
    """Return the means here. All workers of a deployment find the same: they share configuration and GPUs."""
    if device.type == "cpu":
        return Means("cpu", why_no_gloo(), why_no_gloo())
    return _means_of_gpus(device.type, torch.cuda.device_count(), config)


def _means_of_gpus(device: str, num_gpus: int, config: Config) -> Means:
    """Return the means on GPUs; `num_gpus` is what a worker sees: one where the launcher assigns GPUs."""
    ranks, topology = config.engine.tensor_parallel_size, config.topology
    workers = ranks * (topology.prefill_workers + topology.decode_workers)
    if config.ray.address is not None:
        is_part = 0 < (config.ray.gpus_per_worker or 0) < 1
        return Means(
            *(device, _nccl_on("Ray may put two workers on one GPU (ray.gpus_per_worker)" if is_part else None)),
            no_ipc="on a Ray cluster workers need not be on one GPU",
            no_reach="on a Ray cluster it is not known beforehand which GPUs reach each other",
        )
    shared = f"{workers} worker processes share {num_gpus} GPUs" if workers > num_gpus else None
    several = f"ipc is for processes on one GPU, and there are {num_gpus}: CUDA_VISIBLE_DEVICES=0 leaves one"
    return Means(device, _nccl_on(shared), why_no_gloo() or (several if num_gpus > 1 else None), _no_reach(num_gpus))


def _nccl_on(shared: str | None) -> str | None:
    if (lack := why_no_nccl()) is not None or shared is None:
        return lack
    return f"NCCL refuses two processes on one GPU, and {shared}"


def _no_reach(num_gpus: int) -> str | None:
    for gpu in range(num_gpus):
        for other in range(num_gpus):
            if gpu != other and not torch.cuda.can_device_access_peer(gpu, other):
                return f"GPU {gpu} does not reach the memory of GPU {other}"
    return None


def choose(asked: TransportName, means: Means) -> ChosenTransport:
    """Choose the transport. Raises TransportError where the one that was asked for cannot be used."""
    if asked is TransportName.HOST:
        return ChosenTransport(asked, "asked for")
    if asked is TransportName.AUTO:
        return _best(means)
    problem = means.no_ipc if asked is TransportName.IPC else means.no_collective
    if problem is not None:
        raise TransportError(f"transport {asked.value} cannot be used here: {problem}; use auto or host")
    return ChosenTransport(asked, "asked for")


def _best(means: Means) -> ChosenTransport:
    if means.device == "cpu":
        why = "KV is in the memory of the CPU, which the KV pool shares with all workers of a node"
        return ChosenTransport(TransportName.HOST, why)
    if means.no_ipc is None:
        return ChosenTransport(TransportName.IPC, "all workers are on one GPU")
    if means.no_collective is None and means.no_reach is None:
        return ChosenTransport(TransportName.COLLECTIVE, "each worker has a GPU, and these reach each other's memory")
    return ChosenTransport(TransportName.HOST, means.no_collective or means.no_reach or "nothing faster is there")


log = logging.getLogger("alignedserve.transport")


def chosen_for(place: Place, device: torch.device) -> ChosenTransport:
    """Choose the transport. Raises TransportError where the one that was asked for cannot be used."""
    config = place.config
    if config.topology.colocated:
        return ChosenTransport(TransportName.HOST, "there is no other worker to send to")
    is_open = config.transport is TransportName.AUTO
    if is_open and config.why_host is not None:
        chosen = ChosenTransport(TransportName.HOST, config.why_host)
    else:
        chosen = choose(config.transport, means_of(device, config))
    if is_open and chosen.name is TransportName.HOST and device.type == "cuda":
        fell_back("KV from GPU to GPU", chosen.why, "it goes through the KV pool")
    return chosen


def open_transport(
    place: Place,
    chosen: ChosenTransport,
    cache: torch.Tensor,
    pace: CopyPace,
    team: Team | None,
    fault: Callable[[], None] = lambda: None,
) -> tuple[Transport, torch.Tensor]:
    """Open the transport, and return it with the engine's device cache, which may lie elsewhere from now on.

    The cache must still be empty. Every rank of a `team` opens its transport. `fault` is that of Direct.
    """
    config, spec, name = place.config, place.spec, holder(place.spec.worker, place.incarnation)
    if not config.topology.colocated:
        log.info("transport: %s (%s)", chosen.name.value, chosen.why)
    if chosen.name is TransportName.HOST:
        return ThroughTheArena(), cache
    # Imported here, so that only workers that use it need a torch with it.
    from alignedserve.transport.direct import Direct
    from alignedserve.transport.mapping import CacheFile, CudaMaps, Maps
    from alignedserve.transport.payload import DeviceBlocks
    from alignedserve.transport.together import together

    maps: Maps | None = None
    if chosen.name is TransportName.IPC and cache.device.type == "cpu":
        own = lock_name(spec.deployment, name, spec.rank)
        maps = file = CacheFile(place.shared_memory, f"{spec.deployment}-", f"{own}.cache")
        cache = file.zeros(cache.shape, cache.dtype)
    elif chosen.name is TransportName.IPC:
        maps = CudaMaps(cache.device)
    direct = Direct(
        *(name, spec.host, DeviceBlocks(cache), pace),
        verify=config.verifies_transfers(chosen.name),
        timeout_s=config.wire.transfer_timeout_s,
        maps=maps,
        rank=spec.rank,
        fault=fault,
    )
    return (direct if team is None else together(direct, team)), cache
