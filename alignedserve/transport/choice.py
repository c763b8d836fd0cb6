"""Which transport a worker uses, and why: of what is asked for, and of what is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from alignedserve.config import TransportName
from alignedserve.errors import TransportError
from alignedserve.transport.groups import why_no_gloo
from alignedserve.transport.ipc import why_no_ipc


@dataclass(frozen=True, slots=True)
class Means:
    """What this worker has to send with; of each, why it cannot be used, or None."""

    device: str  # where its KV is: cpu, cuda
    no_collective: str | None
    no_ipc: str | None


class Chosen(NamedTuple):
    name: TransportName
    why: str


def means_of(device: torch.device) -> Means:
    no_collective = why_no_gloo()
    if device.type != "cpu":
        no_collective = f"groups for KV on {device.type} (NCCL) are not there yet"
    return Means(device.type, no_collective, why_no_ipc(device))


def choose(asked: TransportName, means: Means) -> Chosen:
    """TransportError where what is asked for cannot be."""
    if asked is TransportName.HOST:
        return Chosen(asked, "asked for")
    if asked is TransportName.AUTO:
        return Chosen(TransportName.HOST, _why_host(means))
    problem = means.no_ipc if asked is TransportName.IPC else means.no_collective
    if problem is not None:
        raise TransportError(f"transport {asked.value} cannot be used here: {problem}; auto and host can")
    return Chosen(asked, "asked for")


def _why_host(means: Means) -> str:
    if means.device == "cpu":
        return "KV is in the memory of the CPU, which the KV pool shares with all workers of a node"
    return means.no_collective or "nothing faster is there"
