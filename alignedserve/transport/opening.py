"""Choose and open the transport of a worker when it starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from alignedserve.config.choices import TransportName
from alignedserve.config.config import Config
from alignedserve.engine.device.devices import gpu_uuid
from alignedserve.engine.device.groups import why_no_nccl, why_no_stores
from alignedserve.engine.device.pace import CopyPace
from alignedserve.engine.device.ranks import Team
from alignedserve.errors import TransportError
from alignedserve.fallbacks import fell_back
from alignedserve.machine.gpus import gpus_reached
from alignedserve.protocol.messages import holder
from alignedserve.protocol.roads import Endpoint
from alignedserve.shell.part import Place, lock_name
from alignedserve.transport.transport import ThroughTheArena, Transport


class ChosenTransport(NamedTuple):
    name: TransportName
    why: str


def choose(device: torch.device, config: Config) -> ChosenTransport:
    """Choose what this worker offers; each pair then has the road that both ends allow (protocol/roads.py).

    Raises TransportError where the transport that was asked for cannot be used.
    """
    asked = config.transport
    if asked is TransportName.HOST:
        return ChosenTransport(asked, "asked for")
    if asked is TransportName.AUTO and device.type == "cpu":
        why = "KV is in the memory of the CPU, which the KV pool shares with all workers of a node"
        return ChosenTransport(TransportName.HOST, why)
    problem = _why_no_collective(device, config) if asked is TransportName.COLLECTIVE else why_no_stores()
    is_open = asked in (TransportName.AUTO, TransportName.DIRECT)
    is_spread = asked is TransportName.DIRECT and config.ray.address is not None
    if is_spread and problem is None and _why_no_collective(device, config) is None:
        why = "by mapped memory within a node, by torch.distributed between nodes"
        return ChosenTransport(TransportName.DIRECT, why)
    if is_open and problem is None:
        why = "between workers of a node that read each other's memory"
        return ChosenTransport(TransportName.IPC, why)
    if is_open:
        return ChosenTransport(TransportName.HOST, problem or "")
    if problem is not None:
        raise TransportError(f"transport {asked.value} cannot be used here: {problem}; use auto or host")
    return ChosenTransport(asked, "asked for")


def _why_no_collective(device: torch.device, config: Config) -> str | None:
    if device.type == "cpu" or config.engine.tensor_parallel_size > 1:
        return why_no_stores()
    if (lack := why_no_nccl()) is not None:
        return lack
    topology, num_gpus = config.topology, torch.cuda.device_count()
    workers, shared = topology.prefill_workers + topology.decode_workers, None
    if config.ray.address is None and workers > num_gpus:  # with Ray a worker sees its own GPU only
        shared = f"{workers} worker processes share {num_gpus} GPUs"
    elif config.ray.address is not None and 0 < (config.ray.gpus_per_worker or 0) < 1:
        shared = "Ray may put two workers on one GPU (ray.gpus_per_worker)"
    return f"NCCL refuses two processes on one GPU, and {shared}" if shared is not None else None


log = logging.getLogger("alignedserve.transport")


def chosen_for(place: Place, device: torch.device) -> ChosenTransport:
    """Choose the transport. Raises TransportError where the one that was asked for cannot be used."""
    config = place.config
    if config.topology.colocated:
        return ChosenTransport(TransportName.HOST, "there is no other worker to send to")
    if config.lends and config.transport in (TransportName.AUTO, TransportName.HOST):
        return ChosenTransport(TransportName.HOST, "prefill workers decode too, and hand requests on by the KV pool")
    is_open = config.transport in (TransportName.AUTO, TransportName.DIRECT)
    if is_open and config.why_host is not None:
        chosen = ChosenTransport(TransportName.HOST, config.why_host)
    else:
        chosen = choose(device, config)
    if is_open and device.type == "cuda":
        why = chosen.why if chosen.name is TransportName.HOST else _why_alone(device)
        if why is not None:
            fell_back("KV from GPU to GPU", why, "it goes through the KV pool")
    return chosen


def _why_alone(device: torch.device) -> str | None:
    """Return why no other GPU of the machine is reached; None where one is, or there is no other."""
    others = peers_of(device)
    return f"GPU {device.index or 0} reads the memory of no other GPU" if others and not any(others.values()) else None


def peers_of(device: torch.device) -> dict[str, bool]:
    """Return the UUIDs of the machine's other GPUs, and whether this one reads their memory.

    Torch knows those that this process sees, the driver all of them.
    """
    own, cuda = device.index or 0, torch.cuda
    seen = {
        gpu_uuid(torch.device("cuda", number)): cuda.can_device_access_peer(own, number)
        for number in range(cuda.device_count())
        if number != own
    }
    return gpus_reached(gpu_uuid(device)) | seen


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
    from alignedserve.transport.mailbox import mailbox_of
    from alignedserve.transport.mapping import CacheFile, CudaMaps, Maps
    from alignedserve.transport.payload import DeviceBlocks
    from alignedserve.transport.together import together
    from alignedserve.transport.turns import communicators_on

    maps: Maps | None = None
    on, communicators = Endpoint(""), None  # where the KV is sent
    is_mapped, also_sends = chosen.name is not TransportName.COLLECTIVE, chosen.name is TransportName.DIRECT
    if is_mapped and cache.device.type == "cpu":
        own = lock_name(spec.deployment, name, spec.rank)
        maps = file = CacheFile(place.shared_memory, f"{spec.deployment}-", f"{own}.cache")
        cache, on = file.zeros(cache.shape, cache.dtype), Endpoint("", "cpu", also_sends=also_sends)
    elif is_mapped:
        reached = frozenset(uuid for uuid, is_read in peers_of(cache.device).items() if is_read)
        maps, on = CudaMaps(cache.device), Endpoint("", gpu_uuid(cache.device), reached, also_sends)
    if not is_mapped or also_sends:
        communicators = communicators_on(cache.device, 1 if team is None else team.size)
    direct = Direct(
        *(name, mailbox_of(spec), DeviceBlocks(cache), pace),
        verify=config.verifies_transfers(chosen.name),
        timeout_s=config.wire.transfer_timeout_s,
        maps=maps,
        communicators=communicators,
        on=on,
        node=spec.node,
        rank=spec.rank,
        fault=fault,
    )
    return (direct if team is None else together(direct, team)), cache
