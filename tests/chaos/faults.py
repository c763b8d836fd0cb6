"""What goes wrong in a trial. Each fault hurts a real process, disk, clock or wire, and ends by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Protocol

import httpx

from alignedserve.gateway.access.keys import hash_key
from tests.chaos.clock import WallClock
from tests.chaos.memory_group import MemoryGroup
from tests.chaos.networks import OneWayRoad, Wire
from tests.chaos.no_fork import ProcessRoom
from tests.chaos.parts import ROLES, Parts, role_of
from tests.cluster.conftest import Nodes, Resources
from tests.end_to_end.deployment import NAME, Deployment, held
from tests.planted import WAYS, Hangs
from tests.power_cut import Power
from tests.redis_server import RedisServer
from tests.small_disk import SmallDisk

KINDS = (
    *("kills", "freezes", "full disks", "slow disks", "full shm", "clock steps", "redis kills", "nodes lost", "cuts"),
    *("launcher kills", "hangs", "torn writes", "no forks", "hung Ray", "one-way cuts", "pauses", "starved", "weights"),
    *("slow redis", "orders", "flipped pages", "bad wires", "lossy wires", "disk errors", "redis forgets"),
    *("memory limits", "new keys", "midnights"),
)
FROZEN_S = (0.2, 8.0)  # shorter and longer than the silence after which a process counts as dead (3 s)
PAUSED_S = (5.0, 40.0)  # a machine that is moved to another host
QUOTA, QUOTA_S = (0.01, 0.1), (2.0, 10.0)  # seconds of a processor in a period, and how long
REPLACED_S = (1.0, 6.0)
MORE_BYTES, LIMITED_S = (1 << 16, 1 << 18, 1 << 22), (2.0, 10.0)
KNOWN_S = 120.0  # for a change of the keys file or of the day to count, whatever is away meanwhile
DAILY_KEY, MOST_DAILY = "as-chaos-daily", 100  # answers of a day: ten times its budget
SECONDS_OF_DAY = 86_400
SMALL = {"model": NAME, "prompt": "Hi", "max_tokens": 8, "temperature": 0}
ORDER_S = 60.0  # for an order to be carried out
FULL_S = (0.5, 4.0)
STEPS_S = (-36_000, -600, -1, 1, 600, 36_000)
CUT_S = (0.5, 10.0)
TEAR_S = 10.0  # most that a write is waited for
NO_FORK_S = (0.5, 8.0)
HUNG_RAY_S = (2.0, 12.0)  # after about 18 Ray takes a node for lost
RAYS_SERVERS = ("gcs_server", "raylet")
GONE_S = 3.0  # most that no launcher is there: parts end after 60, and the next one loads its libraries first
SLOW_S, SYNC_S = (2.0, 10.0), (0.2, 3.0)
STILL_S, QUIET_S = 6.0, 10.0  # `launch.still_s` and `launch.quiet_s` of the deployments that hang
NOTICED_S = 15.0  # for a part that hangs to be ended: a third more than STILL_S, and two looks, on a busy machine
COMES_S = 5.0  # for a part to come to the place where it is to hang
STOPPED = "stopped"
PLACES_OF = {
    "router": ("turn",),
    "pool": ("turn",),
    "prefill": ("turn", "step", "copy"),
    "decode": ("turn", "step", "copy"),
    "gateway": ("turn", "event loop"),
    "jobs": ("turn", "event loop"),
}


class Fault(Protocol):
    kind: str  # its column in the table
    weight: float  # how often it is drawn

    async def strike(self, draw: Random) -> str:
        """Do the harm, and undo what does not mend by itself; return what was hurt, or nothing."""


def _kill(parts: Parts, draw: Random, roles: Collection[str]) -> str:
    """Kill a part of these roles that may be hurt now; return its name, or nothing."""
    chosen = parts.choose(draw, roles)
    if chosen is None:
        return ""
    part, pid = chosen
    with suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(pid, signal.SIGKILL)
        return part
    return ""


class Kill:
    kind, weight = "kills", 12.0

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def strike(self, draw: Random) -> str:
        return await asyncio.to_thread(_kill, self._parts, draw, ROLES)


class Freeze:
    """Stop a process for a while: it goes on as if nothing had been."""

    kind, weight = "freezes", 3.0

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def strike(self, draw: Random) -> str:
        chosen = await asyncio.to_thread(self._parts.choose, draw)
        if chosen is None:
            return ""
        (part, pid), frozen_s = chosen, draw.uniform(*FROZEN_S)
        with suppress(ProcessLookupError):  # it has just ended by itself
            with held(pid):
                await asyncio.sleep(frozen_s)
            self._parts.note(part)  # now it may end itself
            return f"{part} for {frozen_s:.1f} s"
        return ""


class PauseAll:
    """Stop all processes for a while, as where a virtual machine is moved: nobody is away for another.

    A gateway that goes on closes connections that were idle for too long, just as clients may send by them, so it
    counts as hurt; streams go on."""

    kind, weight = "pauses", 0.3

    def __init__(self, deployment: Deployment, parts: Parts) -> None:
        self._deployment, self._parts = deployment, parts

    async def strike(self, draw: Random) -> str:
        pids = sorted(await asyncio.to_thread(self._deployment.processes))
        with ExitStack() as stopped:
            for pid in pids:
                with suppress(ProcessLookupError):
                    stopped.enter_context(held(pid))
            await asyncio.sleep(for_s := draw.uniform(*PAUSED_S))
        for part in self._parts.running().values():
            if role_of(part) == "gateway":
                self._parts.note(part)
        return f"{len(pids)} processes for {for_s:.1f} s"


class Starve:
    """Leave a part a tenth of a processor, as the quota of a container does."""

    kind, weight = "starved", 1.0

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def strike(self, draw: Random) -> str:
        chosen = await asyncio.to_thread(self._parts.choose, draw)
        if chosen is None:
            return ""
        (part, pid), until, (runs_s, period_s) = chosen, time.monotonic() + draw.uniform(*QUOTA_S), QUOTA
        with suppress(ProcessLookupError):  # it has ended meanwhile
            while time.monotonic() < until:
                with held(pid):
                    await asyncio.sleep(period_s - runs_s)
                await asyncio.sleep(runs_s)
        self._parts.note(part)
        return part


class LimitMemory:
    """Let a part take hardly more memory than it has for a while, as a container's limit does: it may be killed."""

    kind, weight = "memory limits", 1.0

    def __init__(self, group: MemoryGroup, parts: Parts) -> None:
        self._group, self._parts = group, parts

    async def strike(self, draw: Random) -> str:
        chosen = await asyncio.to_thread(self._parts.choose, draw)
        if chosen is None:
            return ""
        (part, pid), until = chosen, time.monotonic() + draw.uniform(*LIMITED_S)
        with suppress(ProcessLookupError), self._group.holding(pid, more := draw.choice(MORE_BYTES)):
            while _runs(pid) and time.monotonic() < until:
                await asyncio.sleep(0.05)
            self._parts.note(part)
            return f"{part}, {more >> 10} KB more: {'it lives' if _runs(pid) else 'killed'}"
        return ""


class ReplaceWeights:
    """Put other weights into the model's folder for a while, and kill a worker, which must not come back with them."""

    kind, weight = "weights", 1.0

    def __init__(self, weights: Path, parts: Parts) -> None:
        self._weights, self._parts = weights, parts
        content = bytearray(weights.read_bytes())
        begin = 8 + int.from_bytes(content[:8], "little")  # behind the header
        content[begin + 1 :: 2] = bytes(byte ^ 0x80 for byte in content[begin + 1 :: 2])  # the signs of all BF16
        self._others = bytes(content)

    async def strike(self, draw: Random) -> str:
        ours = self._weights.rename(self._weights.with_suffix(".kept"))
        try:
            self._weights.write_bytes(self._others)
            killed = await asyncio.to_thread(_kill, self._parts, draw, ("prefill", "decode"))
            await asyncio.sleep(draw.uniform(*REPLACED_S))
        finally:
            ours.replace(self._weights)
        if killed:
            self._parts.note(killed)
        return f"{killed or 'nothing'} was killed meanwhile"


class Order:
    """Have the deployment reload, restart its parts, or take another number of decode workers."""

    kind, weight = "orders", 1.0

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    async def strike(self, draw: Random) -> str:
        words = draw.choice((["reload"], ["restart"], ["scale", "--decode", str(draw.randint(1, 2))]))
        command = [sys.executable, "-m", "alignedserve.cli.main", *words, "--port", str(self._deployment.port)]
        none = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*command, stdout=none, stderr=none)
        try:
            ended = await asyncio.wait_for(process.wait(), ORDER_S)
        except TimeoutError:  # it waits for a part that is hurt
            process.terminate()
            ended = await process.wait()
        return f"{' '.join(words)}, with {ended}"


class ChangeKeys:
    """Add a key to the keys file, which has to count soon, and take it out again. All others count all the time."""

    kind, weight = "new keys", 1.0

    def __init__(self, keys: Path, deployment: Deployment) -> None:
        self._keys, self._deployment, self._whole = keys, deployment, keys.read_text(encoding="utf-8")

    async def strike(self, draw: Random) -> str:
        key = f"as-chaos-{draw.getrandbits(64)}"
        self._replace(f"{self._whole}  - name: new\n    hash: {hash_key(key)}\n")
        try:
            taken_s = await self._until(key, 200)
        finally:
            self._replace(self._whole)
        return f"one counts after {taken_s:.1f} s, and no more after {await self._until(key, 401):.1f} s"

    def _replace(self, text: str) -> None:
        new = self._keys.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        new.replace(self._keys)

    async def _until(self, key: str, status: int) -> float:
        """Wait until a key is answered so; return how long that took."""
        began = time.monotonic()
        while await asyncio.to_thread(_status_of, self._deployment.url, key) != status:
            assert time.monotonic() - began < KNOWN_S, f"a key of the keys file is not answered with {status} in time"
            await asyncio.sleep(0.2)
        return time.monotonic() - began


def _status_of(url: str, key: str, body: Mapping[str, object] | None = None) -> int:
    """Return the status of a question with a key, or 0 where nobody answers."""
    path, headers = "/v1/models" if body is None else "/v1/completions", {"Authorization": f"Bearer {key}"}
    try:
        with httpx.Client(trust_env=False, timeout=ORDER_S) as client:
            return client.request("GET" if body is None else "POST", url + path, headers=headers, json=body).status_code
    except httpx.TransportError:
        return 0


class Midnight:
    """Use up the budget of a day, and let it be midnight, where everybody serves: the key has a new budget."""

    kind, weight = "midnights", 0.5

    def __init__(self, clock: WallClock, deployment: Deployment) -> None:
        self._clock, self._deployment = clock, deployment

    async def strike(self, draw: Random) -> str:
        async with self._clock.turn:  # else another step leads back to a day without a budget
            num_asked = await self._until(429)
            self._clock.step(SECONDS_OF_DAY - int(time.time() + self._clock.offset_s) % SECONDS_OF_DAY - 1)
            await asyncio.sleep(draw.uniform(1.0, 3.0))
            await self._until(200)
        return f"after {num_asked} answers of the day"

    async def _until(self, status: int) -> int:
        """Ask until the answer is this one; return how many others had tokens."""
        until, num_served = time.monotonic() + KNOWN_S, 0
        while (told := await asyncio.to_thread(_status_of, self._deployment.url, DAILY_KEY, SMALL)) != status:
            num_served += told == 200
            assert num_served < MOST_DAILY, f"a key with a budget has had {num_served} answers, and gets more"
            assert time.monotonic() < until, f"a key is not answered with {status} in time, but with {told}"
            await asyncio.sleep(0.1)
        return num_served


class Hang:
    """Hang a part for good, or stop its process: who watches has to end it in time. Here nobody else does."""

    kind, weight = "hangs", 12.0

    def __init__(self, parts: Parts, hangs: Hangs | None = None) -> None:
        """Without `hangs` processes are stopped."""
        self._parts, self._hangs = parts, hangs
        self.hung: Counter[str] = Counter()  # by role, place and way
        self.noticed_s = 0.0  # the longest that any hung

    async def strike(self, draw: Random) -> str:
        chosen = await asyncio.to_thread(self._parts.choose, draw)
        if chosen is None:
            return ""
        part, pid = chosen
        with self._parts.spared(pid), suppress(ProcessLookupError):
            what = await self._hang(draw, role_of(part), pid)
            if not what:
                return ""
            began = time.monotonic()
            self.hung[f"{role_of(part)}: {what}"] += 1
            while _runs(pid):
                if time.monotonic() - began > NOTICED_S:
                    os.kill(pid, signal.SIGKILL)
                    raise AssertionError(f"{part} hangs ({what}), and was not ended within {NOTICED_S} s")
                await asyncio.sleep(0.05)
            self._parts.note(part)
            noticed_s = time.monotonic() - began
            self.noticed_s = max(self.noticed_s, noticed_s)
            return f"{part} ({what}), ended after {noticed_s:.1f} s"
        return ""

    async def _hang(self, draw: Random, role: str, pid: int) -> str:
        """Hang the process; return how, or nothing where it did not come to the place."""
        place, how = draw.choice((STOPPED, *PLACES_OF[role])), draw.choice(WAYS)
        if self._hangs is None or place == STOPPED or not self._hangs.is_planted(pid):
            os.kill(pid, signal.SIGSTOP)
            return STOPPED
        self._hangs.tell(pid, place, how)
        until = time.monotonic() + COMES_S
        while not self._hangs.hangs(pid) and _runs(pid):
            if time.monotonic() > until and self._hangs.take_back(pid):
                return ""
            await asyncio.sleep(0.05)
        return f"{place}, {how}"


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


class KillLauncher:
    """Kill the launcher, and start the next one while the parts go on."""

    kind, weight = "launcher kills", 1.0

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    async def strike(self, draw: Random) -> str:
        await asyncio.to_thread(self._deployment.kill_launcher)
        await asyncio.sleep(draw.uniform(0.0, GONE_S))
        await asyncio.to_thread(self._deployment.launch_again)
        return "the next one serves"


class FillDisk:
    """Fill the disk with files and jobs to the last byte for a while, or almost."""

    kind, weight = "full disks", 1.0

    def __init__(self, disk: SmallDisk) -> None:
        self._disk = disk

    async def strike(self, draw: Random) -> str:
        await asyncio.to_thread(self._disk.fill, draw.choice((0, 0, 4096)))
        try:
            await asyncio.sleep(draw.uniform(*FULL_S))
        finally:
            await asyncio.to_thread(self._disk.make_room)
        return "full"


class SlowDisk:
    """Let the disk with files and jobs take long to sync each of them."""

    kind, weight = "slow disks", 1.0

    def __init__(self, power: Power) -> None:
        self._power = power

    async def strike(self, draw: Random) -> str:
        self._power.slow_down(sync_s := draw.uniform(*SYNC_S))
        try:
            await asyncio.sleep(draw.uniform(*SLOW_S))
        finally:
            self._power.slow_down(0.0)
        return f"{sync_s:.1f} s a sync"


class TornWrite:
    """Kill a gateway or the job runner in the middle of a write to the disk with files and jobs."""

    kind, weight = "torn writes", 2.0

    def __init__(self, power: Power, parts: Parts) -> None:
        self._power, self._parts = power, parts

    async def strike(self, draw: Random) -> str:
        chosen = await asyncio.to_thread(self._parts.choose, draw, ("gateway", "jobs"))
        if chosen is None:
            return ""
        (part, pid), share, until = chosen, draw.random(), time.monotonic() + TEAR_S
        self._power.tear(share, pid)
        try:
            while not self._power.torn_by and time.monotonic() < until and _runs(pid):
                await asyncio.sleep(0.05)
        finally:
            self._power.tear_nothing()
        if not self._power.torn_by:
            return ""
        self._parts.note(part)
        return f"{part} in a write, {share:.0%} of it is there"


class NoFork:
    """Let no process begin for a while, and kill a part, which cannot come back before."""

    kind, weight = "no forks", 1.0

    def __init__(self, room: ProcessRoom, parts: Parts) -> None:
        self._room, self._parts = room, parts

    async def strike(self, draw: Random) -> str:
        with self._room.full():
            killed = await asyncio.to_thread(_kill, self._parts, draw, ROLES)
            await asyncio.sleep(for_s := draw.uniform(*NO_FORK_S))
        return f"for {for_s:.1f} s, {killed or 'nothing'} was killed meanwhile"


class HungRay:
    """Stop one of Ray's servers for a while, and kill a part, which Ray has to start again."""

    kind, weight = "hung Ray", 1.0

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def strike(self, draw: Random) -> str:
        servers = await asyncio.to_thread(self._parts.servers, RAYS_SERVERS)
        if not servers:
            return ""
        pid, for_s = draw.choice(sorted(servers)), draw.uniform(*HUNG_RAY_S)
        with suppress(ProcessLookupError), held(pid):  # its node may end meanwhile
            await asyncio.sleep(draw.uniform(0.0, for_s / 2))
            killed = await asyncio.to_thread(_kill, self._parts, draw, ROLES)
            await asyncio.sleep(for_s / 2)
            return f"{servers[pid]}, {killed or 'nothing'} was killed meanwhile"
        return ""


class FillMemory:
    """Fill the folder in shared memory, and kill the pool or a worker, which needs room there to start again."""

    kind, weight = "full shm", 1.0

    def __init__(self, memory: SmallDisk, parts: Parts) -> None:
        self._memory, self._parts = memory, parts

    async def strike(self, draw: Random) -> str:
        await asyncio.to_thread(self._memory.fill)
        try:
            killed = await asyncio.to_thread(_kill, self._parts, draw, ("pool", "prefill", "decode"))
            await asyncio.sleep(draw.uniform(*FULL_S))
        finally:
            await asyncio.to_thread(self._memory.make_room)
        return f"{killed or 'nothing'} was killed meanwhile"


class StepClock:
    kind, weight = "clock steps", 2.0

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock

    async def strike(self, draw: Random) -> str:
        async with self._clock.turn:
            self._clock.step(by_s := draw.choice(STEPS_S))
        return f"{by_s} s"


class KillRedis:
    kind, weight = "redis kills", 1.0

    def __init__(self, redis: RedisServer) -> None:
        self._redis = redis

    async def strike(self, draw: Random) -> str:
        await asyncio.to_thread(self._redis.kill)
        try:
            await asyncio.sleep(draw.uniform(0.0, FULL_S[1]))
        finally:
            await asyncio.to_thread(self._redis.start)
        return "away"


class SlowRedis:
    kind, weight = "slow redis", 1.0

    def __init__(self, redis: RedisServer) -> None:
        self._redis = redis

    async def strike(self, draw: Random) -> str:
        with suppress(ProcessLookupError), held(self._redis.pid):
            await asyncio.sleep(for_s := draw.uniform(*FROZEN_S))
            return f"says nothing for {for_s:.1f} s"
        return ""


class CutWire:
    kind, weight = "cuts", 4.0

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def strike(self, draw: Random) -> str:
        await asyncio.to_thread(self._wire.cut)
        try:
            await asyncio.sleep(draw.uniform(*CUT_S))
        finally:
            await asyncio.to_thread(self._wire.mend)
        return self._wire.port


class OneWay:
    """Lose all that one machine sends to another for a while; what it is sent arrives."""

    kind, weight = "one-way cuts", 2.0

    def __init__(self, roads: Sequence[OneWayRoad]) -> None:
        self._roads = roads

    async def strike(self, draw: Random) -> str:
        road = draw.choice(self._roads)
        await asyncio.to_thread(road.cut)
        try:
            await asyncio.sleep(for_s := draw.uniform(*CUT_S))
        finally:
            await asyncio.to_thread(road.mend)
        return f"from {road.network} to {road.to}, for {for_s:.1f} s"


class LoseNode:
    """End a node of a cluster after another node like it has come."""

    kind, weight = "nodes lost", 1.0

    def __init__(self, nodes: Nodes, number: int, like: Resources) -> None:
        self._nodes, self._newest, self._like = nodes, number, like
        self._oldest = number  # of the nodes like this that live

    async def strike(self, draw: Random) -> str:
        await asyncio.to_thread(self._nodes.add, self._like)
        await asyncio.to_thread(self._nodes.kill, self._oldest)
        self._oldest += 1
        return f"node {self._oldest - 1}"
