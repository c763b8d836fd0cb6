"""What goes wrong, and when: drawn from a seed, or written down by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias


@dataclass(frozen=True)
class Kill:
    """A process ends, without a word; its launcher starts it again."""

    at: float
    member: str
    back_after_s: float = 0.5
    seen: bool = True  # the launcher tells the router; otherwise its silence must


@dataclass(frozen=True)
class Drop:
    """The next frames on a link do not arrive."""

    at: float
    sender: str
    to: str
    frames: int = 1


@dataclass(frozen=True)
class Slow:
    """All frames on a link take longer for a while, and so come after later ones of other links."""

    at: float
    sender: str
    to: str
    extra_s: float = 0.05
    for_s: float = 1.0


@dataclass(frozen=True)
class Freeze:
    """A process stands still for a while, its heart too, and then goes on as if nothing had been."""

    at: float
    member: str
    for_s: float


Fault: TypeAlias = Kill | Drop | Slow | Freeze


def draw_faults(
    seed: int,
    members: Sequence[str],
    count: int,
    start_at: float,
    end_at: float,
) -> tuple[Fault, ...]:
    draw = Random(f"{seed}/faults")
    faults = (_draw_one(draw, members, draw.uniform(start_at, end_at)) for _ in range(count))
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _draw_one(draw: Random, members: Sequence[str], at: float) -> Fault:
    sender, to = draw.sample(members, 2)
    kind = draw.choice(("kill", "drop", "slow", "freeze"))
    if kind == "kill":
        return Kill(at, to, draw.uniform(0.1, 2.0), seen=draw.random() < 0.7)
    if kind == "freeze":
        return Freeze(at, to, draw.uniform(0.1, 6.0))
    if kind == "drop":
        return Drop(at, sender, to, frames=draw.randint(1, 3))
    return Slow(at, sender, to, draw.expovariate(1 / 0.05), draw.uniform(0.1, 2.0))
