"""Choose and open the transport of a worker when it starts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from alignedserve.config.config import TransportName
from alignedserve.engine.device.pace import CopyPace
from alignedserve.engine.device.ranks import Team
from alignedserve.protocol.messages import holder
from alignedserve.shell.part import Place, lock_name
from alignedserve.transport.choice import ChosenTransport, choose, means_of
from alignedserve.transport.transport import ThroughTheArena, Transport

log = logging.getLogger("alignedserve.transport")


def chosen_for(place: Place, device: torch.device) -> ChosenTransport:
    """Choose the transport. Raises TransportError where the one that was asked for cannot be used."""
    config = place.config
    if config.topology.colocated:
        return ChosenTransport(TransportName.HOST, "there is no other worker to send to")
    is_open = config.transport is TransportName.AUTO and config.why_host is not None
    if is_open:
        return ChosenTransport(TransportName.HOST, str(config.why_host))
    return choose(config.transport, means_of(device, config))


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
        *(name, spec.host, DeviceBlocks(cache), pace),
        verify=config.kvpool.verify_pages,
        timeout_s=config.wire.transfer_timeout_s,
        maps=maps,
        rank=spec.rank,
        fault=fault,
    )
    return (direct if team is None else together(direct, team)), cache
