"""Opens the transport of a worker as it starts."""

from __future__ import annotations

import logging

import torch

from alignedserve.config import TransportName
from alignedserve.engine.pace import Pace
from alignedserve.parts import Part
from alignedserve.transport.choice import choose, means_of
from alignedserve.transport.transport import ThroughTheArena, Transport

log = logging.getLogger("alignedserve.transport")


def open_transport(part: Part, cache: torch.Tensor, hidden_size: int | None, pace: Pace) -> Transport:
    """TransportError where what was asked for cannot be."""
    config = part.config
    if config.topology.colocated:
        return ThroughTheArena()  # there is nobody to send to
    chosen = choose(config.transport, means_of(cache.device))
    log.info("transport: %s (%s)", chosen.name.value, chosen.why)
    if chosen.name is not TransportName.COLLECTIVE:
        return ThroughTheArena()
    # Here, so that only who uses it needs a torch that has it.
    from alignedserve.transport.collective import Collective
    from alignedserve.transport.payload import DeviceBlocks

    return Collective(
        *(part.member.holder, part.spec.host, DeviceBlocks(cache, hidden_size), pace),
        verify=config.kvpool.verify_pages,
        timeout_s=config.wire.transfer_timeout_s,
    )
