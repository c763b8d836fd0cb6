"""Faults and their times: drawn from a seed, or written by hand.

The links are ZeroMQ over TCP, with a connection for each pair of sender and receiver. So frames of a link keep their
order and arrive once; frames of different links overtake each other freely. Frames are lost when a connection breaks
or a process ends. When a link is made again (its receiver was announced as gone, and is back), its frames may overtake
frames of the earlier connection; the simulated links do so too. TCP rules out that a frame arrives twice. The simulator
injects such frames all the same, at any delay, because receivers drop frames with a number that they have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random
from typing import TypeAlias

from alignedserve.protocol.messages import ROUTER

JOBS = "jobs-0"  # the job runner


@dataclass(frozen=True)
class _TimedFault:
    at: float


@dataclass(frozen=True)
class MemberFault(_TimedFault):
    member: str


@dataclass(frozen=True)
class LinkFault(_TimedFault):
    sender: str
    to: str


@dataclass(frozen=True)
class Kill(MemberFault):
    """A process ends without a message; its launcher starts it again."""

    back_after_s: float = 0.5
    seen: bool = True  # the launcher tells the router; if not, the router learns of it from the silence


@dataclass(frozen=True)
class Freeze(MemberFault):
    """A process stops for a while and sends no heartbeats; then it continues as if nothing had happened."""

    for_s: float


@dataclass(frozen=True)
class HangLoop(MemberFault):
    """The loop of a process stands still while its heartbeats go on: nothing is heard of what it is told, until its
    watch ends it after `still_s` (shell/loop_watch.py)."""

    still_s: float
    back_after_s: float = 0.5


@dataclass(frozen=True)
class HangStep(MemberFault):
    """A step or copy that a worker runs never ends, while its loop turns, until its watch ends the worker after
    `still_s` (executor/work_watch.py). Nothing happens to a worker that is idle then."""

    still_s: float
    back_after_s: float = 0.5


@dataclass(frozen=True)
class DropFrames(LinkFault):
    """The next frames on a link do not arrive."""

    frames: int = 1


@dataclass(frozen=True)
class Duplicate(LinkFault):
    """The next frames on a link arrive twice, the second time possibly after later frames."""

    frames: int = 1


@dataclass(frozen=True)
class Slow(LinkFault):
    """All frames on a link take longer for a while, so later frames of other links overtake them."""

    extra_s: float = 0.05
    for_s: float = 1.0


@dataclass(frozen=True)
class FullLink(LinkFault):
    """The receiver takes nothing from a link for a while: a few frames wait, and those that come later are lost."""

    frames: int  # that may wait
    for_s: float


@dataclass(frozen=True)
class Reorder(MemberFault):
    """Every frame to a member takes up to `spread_s` longer for a while, at random: its links overtake each other."""

    spread_s: float
    for_s: float


@dataclass(frozen=True)
class Mute(MemberFault):
    """Heartbeats are lost for a while: the router may take a working process for dead, and the process hears so."""

    for_s: float


@dataclass(frozen=True)
class SlowWorker(MemberFault):
    """Steps and copies take `times` as long for a while, also in a new life of the worker."""

    times: float
    for_s: float


@dataclass(frozen=True)
class LowMemory(MemberFault):
    """A worker has too little memory for steps of more than `most_tokens` for a while; with 0, all its steps fail."""

    most_tokens: int
    for_s: float


@dataclass(frozen=True)
class Skew(MemberFault):
    """The clock of a member's machine is ahead or behind; a process reads the offset once, when it starts."""

    ahead_s: float


@dataclass(frozen=True)
class Poison(_TimedFault):
    """A request ends each worker that runs a step for its token `index`: as the step begins, or as it ends."""

    request: str
    index: int
    at_end: bool = False
    back_after_s: float = 0.5


@dataclass(frozen=True)
class Forge(MemberFault):
    """A member gets frames that no part may say (forging.py)."""


@dataclass(frozen=True)
class BreakTransfer(LinkFault):
    """The next transfers of KV from one worker to another go wrong; their two ends may see different results."""

    ok: bool = False  # what the sender believes
    intact: bool = False  # what the receiver sees
    stalls: bool = False  # it ends by a time-out
    transfers: int = 1


@dataclass(frozen=True)
class Resize(_TimedFault):
    """A new number of workers: no fault itself, but it may come amid faults; workers start or retire."""

    prefill: int | None
    decode: int | None


@dataclass(frozen=True)
class StoreAway(_TimedFault):
    """The store of jobs cannot be used for a while."""

    for_s: float
    hangs: bool = False  # it says nothing until it is back; if not, every use is an error at once
    applies: bool = False  # it does what it is asked, and only the answer is lost


# A saved scenario names the kind of each fault.
Fault: TypeAlias = (
    Kill
    | Freeze
    | HangLoop
    | HangStep
    | DropFrames
    | Duplicate
    | Slow
    | FullLink
    | Reorder
    | Mute
    | SlowWorker
    | LowMemory
    | Skew
    | Poison
    | Forge
    | BreakTransfer
    | Resize
    | StoreAway
)


def calm_at(faults: Iterable[Fault]) -> float:
    """Return when the last fault is over. Skew stays, but is harmless then: clocks differ by as much as before."""
    return max((fault.at + lasts_s(fault) for fault in faults), default=0.0)


def lasts_s(fault: Fault) -> float:
    """Return how long the fault goes on; 0 for a fault of a moment."""
    match fault:
        case Freeze() | Slow() | FullLink() | Reorder() | Mute() | SlowWorker() | LowMemory() | StoreAway():
            return fault.for_s
        case Kill():
            return fault.back_after_s
        case HangLoop() | HangStep():
            return fault.still_s + fault.back_after_s
    return 0.0


# --- Drawn


def draw_faults(seed: int, members: Sequence[str], count: int, start_at: float, end_at: float) -> tuple[Fault, ...]:
    """Draw `count` incidents; an incident may be several faults, such as a death that repeats."""
    draw = Random(f"{seed}/faults")
    faults = [
        fault for _ in range(count) for fault in draw.choice(_DRAWN)(draw, members, draw.uniform(start_at, end_at))
    ]
    faults += _low_memory(seed, members, start_at, end_at)
    faults += _broken_transfers(seed, members, start_at, end_at)
    faults += _resizes(seed, members, start_at, end_at)
    faults += _forged(seed, members, start_at, end_at)
    faults += _full_links(seed, members, start_at, end_at)
    faults += _hangs(seed, members, start_at, end_at)
    return tuple(sorted(faults, key=lambda fault: fault.at))


_Drawn = Callable[[Random, Sequence[str], float], Sequence[Fault]]


def _kill(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    return [_death(draw, draw.choice(members), at)]


def _kill_together(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    return [_death(draw, member, at) for member in draw.sample(members, draw.randint(2, min(4, len(members))))]


def _kill_again(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    member, deaths = draw.choice(members), []
    for _ in range(draw.randint(2, 4)):
        deaths.append(_death(draw, member, at))
        at += deaths[-1].back_after_s + draw.expovariate(1 / 0.3)
    return deaths


def _death(draw: Random, member: str, at: float) -> Kill:
    return Kill(at, member, draw.uniform(0.1, 2.0), seen=draw.random() < 0.7)


def _freeze(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    return [Freeze(at, draw.choice(members), draw.uniform(0.1, 6.0))]


def _unheard(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    """Let a new router not hear a member and announce the others: to them the member goes, and comes back unchanged."""
    others = [member for member in members if member != ROUTER]
    dies = Kill(at, ROUTER, draw.uniform(0.05, 0.5), seen=True)
    return [dies, Mute(at, draw.choice(others), draw.uniform(0.8, 2.5))]


_BUSY = {
    ("gateway", "router"),
    ("router", "prefill"),
    ("prefill", "gateway"),
    ("prefill", "pool"),
    ("pool", "prefill"),
    ("pool", "decode"),
    ("decode", "pool"),
    ("prefill", "decode"),
    ("decode", "prefill"),
    ("decode", "gateway"),
}


def _link(draw: Random, members: Sequence[str]) -> tuple[str, str]:
    """Draw a link between any two members, more often between two that send each other many messages."""
    links = list(permutations(members, 2))
    busy = [(sender, to) for sender, to in links if (_role(sender), _role(to)) in _BUSY]
    return draw.choice(busy if draw.random() < 0.7 else links)


def _role(member: str) -> str:
    return member.partition("-")[0]


def _drop(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    sender, to = _link(draw, members)
    return [DropFrames(at, sender, to, frames=draw.randint(1, 3))]


def _duplicate(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    sender, to = _link(draw, members)
    return [Duplicate(at, sender, to, frames=draw.randint(1, 20))]


def _slow(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    sender, to = _link(draw, members)
    return [Slow(at, sender, to, draw.expovariate(1 / 0.05), draw.uniform(0.1, 2.0))]


def _reorder(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    return [Reorder(at, draw.choice(members), draw.expovariate(1 / 0.02), draw.uniform(0.1, 2.0))]


def _mute(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    return [Mute(at, draw.choice(members), draw.uniform(0.5, 6.0))]


def _slow_worker(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    return [SlowWorker(at, draw.choice(_workers(members)), draw.uniform(2.0, 15.0), draw.uniform(0.1, 3.0))]


def _low_memory(seed: int, members: Sequence[str], start_at: float, end_at: float) -> Sequence[Fault]:
    """Draw low memory in every third run, from its own random numbers: other draws of the seed do not depend on it."""
    draw = Random(f"{seed}/memory")
    if draw.random() > 1 / 3:
        return []
    most_tokens = draw.choice((0, 1, 3, 20))
    return [
        LowMemory(draw.uniform(start_at, end_at), draw.choice(_workers(members)), most_tokens, draw.uniform(0.1, 1.0))
    ]


def _broken_transfers(seed: int, members: Sequence[str], start_at: float, end_at: float) -> Sequence[Fault]:
    """Draw broken transfers in every second run, from their own random numbers; most often both ends see the fault."""
    draw = Random(f"{seed}/transfers")
    sources, receivers = ([member for member in members if _role(member) == role] for role in ("prefill", "decode"))
    if not sources or draw.random() < 1 / 2:
        return []
    ok, intact = draw.choice(((False, False), (False, False), (True, False), (False, True)))
    at, stalls, transfers = draw.uniform(start_at, end_at), draw.random() < 0.3, draw.choice((1, 1, 3, 20))
    return [BreakTransfer(at, draw.choice(sources), draw.choice(receivers), ok, intact, stalls, transfers)]


def _resizes(seed: int, members: Sequence[str], start_at: float, end_at: float) -> Sequence[Fault]:
    """Draw new numbers of workers, each perhaps with a death, in every fifth run, from their own random numbers."""
    draw = Random(f"{seed}/resizes")
    has_prefill, has_decode = (any(_role(member) == role for member in members) for role in ("prefill", "decode"))
    if not has_decode or draw.random() > 1 / 5:
        return []
    faults: list[Fault] = []
    for _ in range(draw.randint(1, 3)):
        at, decode = draw.uniform(start_at, end_at), draw.randint(1, 3)
        faults.append(Resize(at, draw.randint(1, 3) if has_prefill else None, decode))
        if draw.random() < 0.5:
            dies = f"{draw.choice(('prefill', 'decode'))}-{draw.randrange(3)}"
            faults.append(_death(draw, dies, at + draw.uniform(0.0, 1.5)))
    return faults


def _forged(seed: int, members: Sequence[str], start_at: float, end_at: float) -> Sequence[Fault]:
    """Draw forged frames in every third run, from their own random numbers."""
    draw = Random(f"{seed}/forged")
    if draw.random() > 1 / 3:
        return []
    return [Forge(draw.uniform(start_at, end_at), draw.choice(members)) for _ in range(draw.randint(1, 4))]


def _full_links(seed: int, members: Sequence[str], start_at: float, end_at: float) -> Sequence[Fault]:
    """Draw full links in every third run, from their own random numbers."""
    draw = Random(f"{seed}/full links")
    if draw.random() > 1 / 3:
        return []
    return [
        FullLink(draw.uniform(start_at, end_at), *_link(draw, members), draw.randint(0, 8), draw.uniform(0.05, 2.0))
        for _ in range(draw.randint(1, 3))
    ]


def _hangs(seed: int, members: Sequence[str], start_at: float, end_at: float) -> Sequence[Fault]:
    """Draw hangs in every fifth run, from their own random numbers, which leave out the seeds that tests name. The
    watches of real processes wait for longer than these do."""
    draw = Random(f"{seed}/hangs/181293")
    if draw.random() > 1 / 5:
        return []
    faults: list[Fault] = []
    for _ in range(draw.randint(2, 4)):
        at, still_s, back_after_s = draw.uniform(start_at, end_at), draw.uniform(0.3, 8.0), draw.uniform(0.1, 2.0)
        kind, names = draw.choice(((HangLoop, members), (HangStep, _workers(members))))
        faults.append(kind(at, draw.choice(names), still_s, back_after_s))
    return faults


def draw_job_faults(seed: int, members: Sequence[str], start_at: float, end_at: float) -> tuple[Fault, ...]:
    """Draw faults of the job runner and of its store."""
    draw, faults = Random(f"{seed}/faults of jobs"), list[Fault]()
    for _ in range(draw.randint(0, 3)):
        incident = draw.choice((_kill, _kill, _kill_again, _freeze, _mute, _skew))
        faults += incident(draw, [JOBS], draw.uniform(start_at, end_at))
    for _ in range(draw.randint(0, 2)):
        sender, to = draw.sample([JOBS, draw.choice([member for member in members if member != JOBS])], 2)
        at, frames = draw.uniform(start_at, end_at), draw.randint(1, 3)
        faults.append(draw.choice((DropFrames, Duplicate))(at, sender, to, frames))
    for _ in range(draw.randint(0, 6)):
        hangs, applies = draw.choice(((False, False), (False, True), (False, True), (True, False)))
        faults.append(
            StoreAway(draw.uniform(start_at, end_at), draw.choice((0.01, 0.05, 0.3, 2.0, 9.0)), hangs, applies)
        )
    return tuple(faults)


def _workers(members: Sequence[str]) -> Sequence[str]:
    return [member for member in members if _role(member) in ("prefill", "decode")] or members


def _skew(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    """Draw a clock that is wrong from the start, or from the member's next life on."""
    return [Skew(draw.choice((0.0, at)), draw.choice(members), draw.uniform(-5.0, 5.0))]


_DEATHS: Sequence[_Drawn] = (_kill, _kill_together, _kill_again, _freeze, _mute, _unheard)
_FRAMES: Sequence[_Drawn] = (_drop, _drop, _drop, _duplicate, _slow, _slow, _reorder, _reorder)  # most links are idle
_CLOCKS: Sequence[_Drawn] = (_slow_worker, _slow_worker, _skew)
_DRAWN = (*_DEATHS, *_FRAMES, *_CLOCKS)
