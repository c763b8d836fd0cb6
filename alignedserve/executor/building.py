"""Build one rank of a worker: its engine, its pace, its transport, and the hands that use them."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic

import torch

from alignedserve.core import Role
from alignedserve.engine.device.large_pages import map_ahead
from alignedserve.engine.device.pace import CopyPace
from alignedserve.engine.device.pinning import cudart_for
from alignedserve.engine.device.ranks import Team
from alignedserve.executor.copies import end_where_lost
from alignedserve.executor.hands import EngineHands
from alignedserve.executor.leading import Say, say_nothing
from alignedserve.executor.loading import AnEngine, device_for, load, with_blocks
from alignedserve.executor.work_watch import WorkWatch
from alignedserve.kernels.common.decoder import Pauses
from alignedserve.machine.energy import EnergyMeter
from alignedserve.machine.shared_files import HolderLock, remove_stale
from alignedserve.protocol.messages import holder
from alignedserve.shell.part import Place, lock_name
from alignedserve.sizing.capacity import Capacity
from alignedserve.sizing.claims import Claim
from alignedserve.transport.joining import meet
from alignedserve.transport.opening import chosen_for, open_transport
from alignedserve.transport.transport import ThroughTheArena, Transport

_SIOCGIFADDR, _REQUEST_BYTES = 0x8915, 40  # of the kernel: a name in, an IPv4 address out


def keep_nccl_at(host: str) -> None:
    """Have NCCL listen at the interface of this address alone, and tell no other process of its state, unless
    the environment says otherwise (it outweighs nccl.conf)."""
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")  # a port at which any user of this machine may ask
    if (name := interface_of(host)) is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this IPv4 address, such as `lo`; None where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, name.encode().ljust(_REQUEST_BYTES, b"\0"))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


@dataclass(frozen=True)
class RankParts(Generic[AnEngine]):
    """One rank of a worker, ready for work."""

    place: Place
    engine: AnEngine
    capacity: Capacity  # with as many blocks as the engine has
    pace: CopyPace
    transport: Transport
    team: Team | None  # the other ranks, where there are any

    @property
    def copies_beside(self) -> bool:
        """Return whether copies from the pool go on beside a decode worker's steps.

        A GPU has engines for that. On a CPU such copies would take bandwidth of the memory that steps read: a copy
        between two steps delays the decoding requests less, and the request joins much sooner.
        Ranks would begin such copies at different steps."""
        return self.engine.device.type != "cpu" and self.engine.ranks.size == 1

    def hands(
        self,
        say: Say = say_nothing,
        look_ahead: int = 0,
        watch: WorkWatch | None = None,
        energy: EnergyMeter | None = None,
        pauses: Pauses | None = None,
    ) -> EngineHands:
        config, limits, spec = self.place.config, self.capacity.limits, self.place.spec
        num_slots = limits.num_blocks * limits.block_size if spec.acts_as is Role.DECODE else 0
        return EngineHands(
            self.engine,
            self.place.arena_path(spec.rank),
            limits.page_size,
            config.verifies_pages,
            cudart_for(self.engine.cache.device),
            self.transport,
            self.pace,
            num_on_host=config.policy.block_use.num_on_host(num_slots),
            say=say,
            look_ahead=look_ahead,
            watch=watch,
            energy=energy,
            pauses=pauses,
        )


@contextmanager
def build_rank(place: Place, kind: type[AnEngine]) -> Iterator[RankParts[AnEngine]]:
    """Build one rank of a worker with an engine of this kind, and take it down again."""
    _, capacity = place.capacity()
    chosen = chosen_for(place, device_for(place))
    spec, size = place.spec, place.config.engine.tensor_parallel_size
    keep_nccl_at(spec.host)
    # Killed lives of this worker may have left their locks and device caches. The lock shows others that this process
    # lives and may still write to its leased pages.
    remove_stale(place.shared_memory, lock_name(spec.deployment, f"{spec.worker}."))
    name = lock_name(spec.deployment, holder(spec.worker, place.incarnation), spec.rank)
    lock, team = HolderLock(place.shared_memory, name), None
    claim = Claim.join(place.shared_memory, spec.deployment, as_worker=True)
    if size > 1:
        team = meet(spec, size, device_for(place))
    transport: Transport = ThroughTheArena()
    try:
        engine = load(place, kind, team)
        # A GPU copies beside its steps by itself: nothing is held back there.
        on_cpu = engine.device.type == "cpu"
        pace = CopyPace(threads=torch.get_num_threads()) if on_cpu else CopyPace(share=1.0)
        lost = partial(end_where_lost, engine.device)
        # The transport may move the engine's device cache to memory that it can send from.
        transport, engine.cache = open_transport(place, chosen, engine.cache, pace, team, lost)
        if on_cpu:
            map_ahead(engine.cache, torch.get_num_threads())
        yield RankParts(place, engine, with_blocks(capacity, engine), pace, transport, team)
    finally:
        transport.close()
        lock.release()
        if claim is not None:
            claim.close()
