"""Faults and their times.

The links are ZeroMQ over TCP, with a connection for each pair of sender and receiver. So frames of a link keep their
order and arrive once; frames of different links overtake each other freely. Frames are lost when a connection breaks
or a process ends. When a link is made again (its receiver was announced as gone, and is back), its frames may overtake
frames of the earlier connection; the simulated links do so too. TCP rules out that a frame arrives twice. The simulator
injects such frames all the same, at any delay, because receivers drop frames with a number that they have seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

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
class OneWay(MemberFault):
    """All that a member sends is lost for a while, heartbeats too, or all that others send to it; what goes the other
    way arrives. Transfers of KV are not hurt: BreakTransfer does that."""

    leaves: bool  # whether what the member sends is lost
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
    """A request ends each worker that runs a step for token `index`: as the step begins, or as it ends."""

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


@dataclass(frozen=True)
class SlowDisk(_TimedFault):
    """Every use of the store of jobs takes `use_s` longer for a while. What a job runner writes as it is killed is
    lost."""

    use_s: float
    for_s: float


@dataclass(frozen=True)
class TornWrite(_TimedFault):
    """The job runner is killed amid its next use of the store of jobs: all of that is there afterwards, or nothing."""

    applies: bool
    back_after_s: float


@dataclass(frozen=True)
class NoFork(_TimedFault):
    """No process can begin for a while: a member that ends is back when that is over."""

    for_s: float


@dataclass(frozen=True)
class HungRay(_TimedFault):
    """Ray answers nothing for a while: its launcher hears of no end, tells the router of none, and starts nothing."""

    for_s: float


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
    | OneWay
    | SlowWorker
    | LowMemory
    | Skew
    | Poison
    | Forge
    | BreakTransfer
    | Resize
    | StoreAway
    | SlowDisk
    | TornWrite
    | NoFork
    | HungRay
)


def calm_at(faults: Iterable[Fault]) -> float:
    """Return when the last fault is over. Skew stays, but is harmless then: clocks differ by as much as before."""
    return max((fault.at + lasts_s(fault) for fault in faults), default=0.0)


def lasts_s(fault: Fault) -> float:
    """Return how long the fault goes on; 0 for a fault of a moment."""
    match fault:
        case Kill() | TornWrite():
            return fault.back_after_s
        case HangLoop() | HangStep():
            return fault.still_s + fault.back_after_s
    return getattr(fault, "for_s", 0.0)
