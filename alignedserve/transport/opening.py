"""Opens the transport of a worker as it starts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from alignedserve.config.config import TransportName
from alignedserve.engine.device.pace import Pace
from alignedserve.engine.device.ranks import Team
from alignedserve.protocol.messages import holder
from alignedserve.shell.part import Place, lock_name
from alignedserve.transport.choice import Chosen, choose, means_of
from alignedserve.transport.transport import ThroughTheArena, Transport

log = logging.getLogger("alignedserve.transport")


def chosen_for(place: Place, device: torch.device) -> Chosen:
    """TransportError where what was asked for cannot be."""
    config = place.config
    if config.topology.colocated:
        return Chosen(TransportName.HOST, "there is nobody to send to")
    is_open = config.transport is TransportName.AUTO and config.why_host is not None
    if is_open:
        return Chosen(TransportName.HOST, str(config.why_host))
    return choose(config.transport, means_of(device, config))


def open_transport(
    place: Place,
    chosen: Chosen,
    cache: torch.Tensor,
    hidden_size: int | None,
    pace: Pace,
    team: Team | None,
    fault: Callable[[], None] = lambda: None,
) -> tuple[Transport, torch.Tensor]:
    """And the device cache of the engine, which may lie elsewhere from now on; nothing may be in it yet.

    All ranks of a `team` open theirs. `fault` is as Direct has it."""
    config, spec, name = place.config, place.spec, holder(place.spec.worker, place.incarnation)
    if not config.topology.colocated:
        log.info("transport: %s (%s)", chosen.name.value, chosen.why)
    if chosen.name is TransportName.HOST:
        return ThroughTheArena(), cache
    # Here, so that only who uses it needs a torch that has it.
    from alignedserve.transport.direct import Direct
    from alignedserve.transport.mapping import CacheFile, CudaMaps, Maps, remove_earlier
    from alignedserve.transport.payload import DeviceBlocks
    from alignedserve.transport.together import together

    maps: Maps | None = None
    if chosen.name is TransportName.IPC and cache.device.type == "cpu":
        own = lock_name(spec.deployment, name, spec.rank)
        remove_earlier(place.shared_memory, lock_name(spec.deployment, f"{spec.worker}."))
        maps = file = CacheFile(place.shared_memory, f"{spec.deployment}-", f"{own}.cache")
        cache = file.zeros(cache.shape, cache.dtype)
    elif chosen.name is TransportName.IPC:
        maps = CudaMaps(cache.device)
    direct = Direct(
        *(name, spec.host, DeviceBlocks(cache, hidden_size), pace),
        verify=config.kvpool.verify_pages,
        timeout_s=config.wire.transfer_timeout_s,
        maps=maps,
        rank=spec.rank,
        fault=fault,
    )
    return (direct if team is None else together(direct, team)), cache
