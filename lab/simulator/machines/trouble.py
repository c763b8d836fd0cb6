"""The faults that links, clocks and machines have at the moment; the world asks before it acts."""

from __future__ import annotations

from collections import Counter
from random import Random

from alignedserve.core import StepPlan
from alignedserve.lab.simulator.machines import faults
from alignedserve.lab.simulator.machines.transfers import Mishap

_Link = tuple[str, str]  # sender, receiver
_Until = tuple[float, float]  # until when, and by how much
_NOT = (0.0, 0.0)


class Trouble:
    """The faults that are in force."""

    def __init__(self, seed: int) -> None:
        self._draw = Random(f"{seed}/trouble")
        self._drops: Counter[_Link] = Counter()
        self._doubles: Counter[_Link] = Counter()
        self._breaks: Counter[_Link] = Counter()
        self._mishaps: dict[_Link, Mishap] = {}
        self._slow_links: dict[_Link, _Until] = {}
        self._reordered: dict[str, _Until] = {}  # receiver ->
        self.lost_at: dict[_Link, float] = {}  # when a link last lost a frame
        self._full_until: dict[_Link, float] = {}
        self._room: Counter[_Link] = Counter()  # frames that still find room in a full link
        self._store_away: faults.StoreAway | None = None
        self._slow_work: dict[str, _Until] = {}
        self._low_memory: dict[str, _Until] = {}
        self._mute: dict[str, float] = {}  # member -> until when
        self._one_way: dict[tuple[str, bool], float] = {}  # member, whether what it sends is lost -> until when
        self._slow_disk = _NOT
        self._torn: faults.TornWrite | None = None
        self.starts_at = self.ends_are_told_at = 0.0  # when processes can begin again; when a launcher hears of ends
        self._poisons: list[faults.Poison] = []
        self._ahead_s: dict[str, float] = {}
        self.has_begun = False  # False as long as there was no fault: the world then need not ask

    def begin(self, fault: faults.Fault) -> None:
        """Let a fault begin; it replaces an earlier fault of its kind on the same link or member."""
        self.has_begun = True
        match fault:
            case faults.DropFrames(_, sender, to, frames):
                self._drops[sender, to] = frames
            case faults.Duplicate(_, sender, to, frames):
                self._doubles[sender, to] = frames
            case faults.BreakTransfer(_, sender, to, ok, intact, stalls, transfers):
                self._breaks[sender, to], self._mishaps[sender, to] = transfers, Mishap(ok, intact, stalls)
            case faults.Slow(at, sender, to, extra_s, for_s):
                self._slow_links[sender, to] = (at + for_s, extra_s)
            case faults.FullLink(at, sender, to, frames, for_s):
                self._full_until[sender, to], self._room[sender, to] = at + for_s, frames
            case faults.StoreAway():
                self._store_away = fault
            case faults.Reorder(at, member, spread_s, for_s):
                self._reordered[member] = (at + for_s, spread_s)
            case faults.SlowWorker(at, member, times, for_s):
                self._slow_work[member] = (at + for_s, times)
            case faults.LowMemory(at, member, most_tokens, for_s):
                self._low_memory[member] = (at + for_s, most_tokens)
            case faults.Mute(at, member, for_s):
                self._mute[member] = at + for_s
            case faults.OneWay(at, member, leaves, for_s):
                self._one_way[member, leaves] = at + for_s
            case faults.SlowDisk(at, use_s, for_s):
                self._slow_disk = (at + for_s, use_s)
            case faults.TornWrite():
                self._torn = fault
            case faults.NoFork(at, for_s):
                self.starts_at = max(self.starts_at, at + for_s)
            case faults.HungRay(at, for_s):
                self.starts_at = max(self.starts_at, at + for_s)
                self.ends_are_told_at = max(self.ends_are_told_at, at + for_s)
            case faults.Skew(_, member, ahead_s):
                self._ahead_s[member] = ahead_s
            case faults.Poison():
                self._poisons.append(fault)

    def poison_in(self, plan: StepPlan, at_end: bool) -> faults.Poison | None:
        """Return what ends a worker as it begins, or ends, this step."""
        for poison in self._poisons:
            for part in plan.parts:
                if part.request == poison.request and part.index >= poison.index and part.sampling is not None:
                    return poison if at_end is poison.at_end else None
        return None

    def extra_s(self, sender: str, to: str, now: float) -> float:
        """Return how much longer a frame takes that is sent now."""
        if not self._slow_links and not self._reordered:
            return 0.0
        slow_until, slow_s = self._slow_links.get((sender, to), _NOT)
        spread_until, spread_s = self._reordered.get(to, _NOT)
        extra_s = slow_s if now < slow_until else 0.0
        return extra_s + (self._draw.uniform(0.0, spread_s) if now < spread_until else 0.0)

    def waits_until(self, sender: str, to: str) -> float:
        """Return until when the link takes no frames."""
        return self._full_until.get((sender, to), 0.0)

    def drops(self, sender: str, to: str, now: float) -> bool:
        """Return whether the next frame is lost; count it."""
        link = (sender, to)
        is_full = now < self._full_until.get(link, 0.0) and not _use_up(self._room, link)
        is_cut = self.is_cut(sender, to, now)
        if is_lost := is_cut or is_full or (bool(self._drops) and _use_up(self._drops, link)):
            self.lost_at[link] = now
        return is_lost

    def is_cut(self, sender: str, to: str, now: float) -> bool:
        """Return whether all that goes this way is lost."""
        return now < max(self._one_way.get((sender, True), 0.0), self._one_way.get((to, False), 0.0))

    def store_slow_s(self, now: float) -> float:
        """Return how much longer a use of the store of jobs takes that begins now."""
        until, use_s = self._slow_disk
        return use_s if now < until else 0.0

    def torn_write(self) -> faults.TornWrite | None:
        """Return how the job runner dies amid the use of the store that begins now, once."""
        torn, self._torn = self._torn, None
        return torn

    def store_away(self, now: float) -> faults.StoreAway | None:
        """Return the fault of the store of jobs, if it has one now."""
        away = self._store_away
        return away if away is not None and now < away.at + away.for_s else None

    def doubles(self, sender: str, to: str) -> bool:
        """Return whether the next frame arrives twice; count it."""
        return bool(self._doubles) and _use_up(self._doubles, (sender, to))

    def mishap(self, sender: str, to: str) -> Mishap | None:
        """Return how the next transfer goes wrong, if it does; count it."""
        link = (sender, to)
        return self._mishaps[link] if self._breaks and _use_up(self._breaks, link) else None

    def mutes(self, member: str, now: float) -> bool:
        return now < self._mute.get(member, 0.0)

    def work_takes(self, member: str, now: float) -> float:
        """Return the factor by which a worker's work takes longer now."""
        until, times = self._slow_work.get(member, _NOT)
        return times if now < until else 1.0

    def has_memory(self, member: str, tokens: int, now: float) -> bool:
        """Return whether a worker has memory for a step of this many tokens."""
        until, most = self._low_memory.get(member, _NOT)
        return now >= until or tokens <= most

    def ahead_s(self, member: str) -> float:
        """Return how far the clock of the member's machine is ahead."""
        return self._ahead_s.get(member, 0.0)


def _use_up(left: Counter[_Link], link: _Link) -> bool:
    if not left[link]:
        return False
    left[link] -= 1
    return True
