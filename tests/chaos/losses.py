"""What memory, disks, stores and wires lose or spoil in a trial: faults as in faults.py, which no process dies of."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

from alignedserve.errors import ArenaError
from alignedserve.kvpool.arena.arena import Arena
from tests.chaos.networks import Wire
from tests.chaos.oracle import FORGETS
from tests.chaos.parts import Parts
from tests.chaos.wires import Wires
from tests.power_cut import Power
from tests.redis_server import RedisServer

ERRORS, ERRORS_S = (errno.EIO, errno.EROFS), (0.5, 8.0)
MOST_CUT_BYTES = 20_000  # of the log of a Redis
BAD_S, DELAYS_S = 8.0, (0.005, 0.1)
LOST_S, BETWEEN_S, LOSSY_S = (0.02, 0.3), (0.05, 0.5), (2.0, 8.0)


class FlipPages:
    """Flip a bit in half of the pages of KV that are whole: who reads them has to find it, and compute them again."""

    kind, weight = "flipped pages", 2.0

    def __init__(self, memory: Path) -> None:
        self._memory = memory

    async def strike(self, draw: Random) -> str:
        flipped = await asyncio.to_thread(flip_pages, self._memory, draw)
        return f"a bit in each of {flipped}" if flipped else ""


def flip_pages(memory: Path, draw: Random) -> int:
    """Flip a bit in half of the whole pages of each arena in a folder; return how many that were."""
    flipped = 0
    for path in (path for path in memory.iterdir() if path.is_file()):
        with suppress(ArenaError, BlockingIOError):  # it is no arena, or one that is made or removed just now
            arena = Arena.attach(path)
            for page in range(arena.extents.num_numbers):
                if arena.contents(page) is not None and draw.random() < 0.5:
                    with arena.payload(page) as payload:
                        payload[draw.randrange(len(payload))] ^= 1 << draw.randrange(8)
                    flipped += 1
            arena.close()
    return flipped


class BadWires:
    """Spoil, break off or delay what a part reads from others: it has to find that out, and links have to come back."""

    kind, weight = "bad wires", 3.0

    def __init__(self, wires: Wires, parts: Parts) -> None:
        self._wires, self._parts = wires, parts

    async def strike(self, draw: Random) -> str:
        chosen = await asyncio.to_thread(self._parts.choose, draw)
        if chosen is None:
            return ""
        (part, pid), before = chosen, self._wires.num_hurt
        delay_s, flips, breaks = 0.0, 0, 0
        match draw.choice(("late", "spoilt", "broken off")):
            case "late":
                delay_s = draw.uniform(*DELAYS_S)
            case "spoilt":
                flips = draw.randint(1, 3)
            case _:
                breaks = draw.randint(1, 3)
        until = time.monotonic() + draw.uniform(1.0, BAD_S)
        with self._wires.bad(pid, delay_s, flips, breaks):
            while time.monotonic() < until and (delay_s or self._wires.num_hurt < before + flips + breaks):
                await asyncio.sleep(0.05)
        self._parts.note(part)
        hurt = self._wires.num_hurt - before
        return f"{part}: {hurt} reads of {flips} spoilt, of {breaks} broken off, all {1e3 * delay_s:.0f} ms late"


class LossyWire:
    """Lose what a machine sends and is sent again and again, for a moment each: its connections go on."""

    kind, weight = "lossy wires", 2.0

    def __init__(self, wires: Sequence[Wire]) -> None:
        self._wires = wires

    async def strike(self, draw: Random) -> str:
        wire, until = draw.choice(self._wires), time.monotonic() + draw.uniform(*LOSSY_S)
        while time.monotonic() < until:
            await asyncio.to_thread(wire.cut)
            try:
                await asyncio.sleep(draw.uniform(*LOST_S))
            finally:
                await asyncio.to_thread(wire.mend)
            await asyncio.sleep(draw.uniform(*BETWEEN_S))
        return wire.port


class DiskErrors:
    """Let each change of the disk with files and jobs fail for a while, or turn the disk read-only."""

    kind, weight = "disk errors", 2.0

    def __init__(self, power: Power) -> None:
        self._power = power

    async def strike(self, draw: Random) -> str:
        error = draw.choice(ERRORS)
        with self._power.failing(error):
            await asyncio.sleep(for_s := draw.uniform(*ERRORS_S))
        return f"{errno.errorcode[error]} for {for_s:.1f} s"


class ForgetRedis:
    """Have Redis forget all, or kill it and cut the end of its log: what is gone is gone, and the rest goes on."""

    kind, weight = FORGETS, 0.5

    def __init__(self, redis: RedisServer) -> None:
        self._redis = redis

    async def strike(self, draw: Random) -> str:
        if draw.random() < 0.5:
            await asyncio.to_thread(self._redis.forget)
            return "everything"
        cut = draw.randint(1, MOST_CUT_BYTES)
        await asyncio.to_thread(self._redis.kill)
        try:
            await asyncio.to_thread(self._redis.cut_log, cut)
        finally:
            await asyncio.to_thread(self._redis.start)
        return f"the last {cut} bytes of its log"
