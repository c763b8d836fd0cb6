"""The KV pool as a process: it runs the pool's core, and makes and removes the arena."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from alignedserve.architectures.families.model_config import ModelConfig, read_config
from alignedserve.config.config import Config
from alignedserve.errors import ArenaError, ArenaTooSmall
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.kvpool.arena.numa import best_place
from alignedserve.kvpool.state import PoolCore
from alignedserve.machine.shared_files import HolderLock, is_held, remove_stale
from alignedserve.protocol.commands import Command, WatchHolder
from alignedserve.protocol.events import Event, HolderGone
from alignedserve.shell.part import OnStart, Part, lock_name
from alignedserve.shell.turn import NoHands
from alignedserve.signs import Stage
from alignedserve.sizing.capacity import Capacity, capacity
from alignedserve.sizing.memory import FreeMemory, why_too_small
from alignedserve.sizing.sizes import with_pool_memory

log = logging.getLogger("alignedserve.kvpool")

WATCH_S = 0.05  # between two looks at the lock of a lost worker, or at free memory
ROOM_S = 5.0  # time for an earlier deployment to free its memory
ROOM_AGAIN_S = 60.0  # time for workers to close the arena of an earlier life: to unpin it on a GPU takes seconds


class _PoolProcessHands(NoHands):
    def __init__(self, directory: Path, deployment: str, ranks: int) -> None:
        self._directory, self._deployment, self._ranks = directory, deployment, ranks
        self.post: Callable[[Event], None] = lambda _: None

    def perform(self, command: Command) -> Event | None:
        match command:
            case WatchHolder(holder):
                threading.Thread(target=self._watch, args=(holder,), name=f"watch-{holder}", daemon=True).start()
                return None
        raise TypeError(f"the pool cannot perform {command}")

    def _watch(self, holder: str) -> None:
        for rank in range(self._ranks):
            name = lock_name(self._deployment, holder, rank)
            while self._is_held(name):
                time.sleep(WATCH_S)  # the kernel drops the lock at the holder's death without telling
        self.post(HolderGone(holder))

    def _is_held(self, name: str) -> bool:
        """Return whether the lock's process lives, or cannot be looked at; remove the lock of one that has ended."""
        try:
            if is_held(self._directory, name):
                return True
            remove_stale(self._directory, f"{name}.lock")
        except ArenaError as error:
            log.warning("%s", error)
            return True
        return False


def _new_arena(part: Part, capacity: Capacity, rank: int) -> Arena:
    """Make the arena; wait for memory that workers free when they close the arena of an earlier incarnation."""
    room_s = ROOM_AGAIN_S if part.incarnation > 1 else ROOM_S
    deadline, place = time.monotonic() + room_s, best_place()
    if place is not None:
        log.info("the KV pool's memory is on NUMA node %d: %s", place.node, place.why)
    while True:
        try:
            return Arena.create(
                part.arena_path(rank),
                pages=capacity.extents,
                payload_bytes=capacity.sizes,
                page_size=part.config.page_size,
                incarnation=part.incarnation,
                place=place,
                advance=part.signs.advance,
            )
        except ArenaTooSmall:
            if time.monotonic() > deadline:
                raise
            time.sleep(WATCH_S)


def _tell_size(config: Config, model: ModelConfig, room: Capacity) -> None:
    if not model.keeps_kv:
        log.info("the KV pool takes %d MB: nothing of this model's requests is kept", config.kvpool.memory_mb)
        return
    tokens, cache = room.num_pages * config.page_size, room.limits.num_tokens * config.topology.decode_workers
    times = f", {tokens / cache:.1f} times what its decode workers' devices hold" if cache else ""
    log.info("the KV pool takes %d MB and holds %d tokens%s", config.kvpool.memory_mb, tokens, times)
    if (why := why_too_small(config, room)) is not None:
        log.warning("%s", why)


def run(part: Part, on_start: OnStart) -> None:
    spec, model = part.spec, read_config(part.folder)
    config = with_pool_memory(part.config, model, part.folder, FreeMemory.here(part.shared_memory))
    room = capacity(config, model)
    _tell_size(config, model, room)
    directory = part.shared_memory
    own = HolderLock(directory, f"{spec.deployment}-{spec.name}")  # there is one pool per node
    arenas: list[Arena] = []
    try:
        ranks = config.engine.tensor_parallel_size
        part.signs.stage(Stage.POOL, ranks * room.num_pages * room.page_bytes)
        for rank in range(ranks):
            arenas.append(_new_arena(part, room, rank))
        hands = _PoolProcessHands(directory, spec.deployment, ranks)
        core = PoolCore(room.extents, config.engine.block_size, part.policy, part.at_work)
        shell = part.shell(core, hands)
        hands.post = shell.post
        on_start(shell)
        part.run(shell)
    finally:
        for arena in arenas:
            arena.unlink()
        own.release()
