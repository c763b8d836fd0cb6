"""Faults and their times, drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from random import Random

from alignedserve.lab.simulator.machines.faults import (
    JOBS,
    BreakTransfer,
    DropFrames,
    Duplicate,
    Fault,
    Forge,
    Freeze,
    FullLink,
    HangLoop,
    HangStep,
    HungRay,
    Kill,
    LowMemory,
    Mute,
    NoFork,
    OneWay,
    Reorder,
    Resize,
    Skew,
    Slow,
    SlowDisk,
    SlowWorker,
    StoreAway,
    TornWrite,
)
from alignedserve.protocol.messages import ROUTER


def draw_faults(seed: int, members: Sequence[str], count: int, start_at: float, end_at: float) -> tuple[Fault, ...]:
    """Draw `count` incidents; an incident may be several faults, such as a death that repeats."""
    draw = Random(f"{seed}/faults")
    faults = [
        fault for _ in range(count) for fault in draw.choice(_DRAWN)(draw, members, draw.uniform(start_at, end_at))
    ]
    in_some_runs = (_low_memory, _broken_transfers, _resizes, _forged, _full_links, _hangs, _long_outages, _pauses)
    for drawn in in_some_runs:
        faults += drawn(seed, members, start_at, end_at)
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


def _long_outages(seed: int, members: Sequence[str], start_at: float, end_at: float) -> Sequence[Fault]:
    """Draw what lasts longer than others wait for a silent member, in every fifth run, from its own random numbers,
    which leave out the seeds that tests name."""
    draw = Random(f"{seed}/outages/1542504")
    if draw.random() > 1 / 5:
        return []
    faults: list[Fault] = []
    for _ in range(draw.randint(3, 6)):
        at, for_s = draw.uniform(start_at, end_at), draw.uniform(0.5, 9.0)
        stops_starts = draw.choice((None, NoFork, HungRay))
        if stops_starts is None:
            faults.append(OneWay(at, draw.choice(members), draw.random() < 0.5, for_s))
        else:
            faults += [stops_starts(at, for_s), _death(draw, draw.choice(members), at + draw.uniform(0.0, for_s))]
    return faults


def _pauses(seed: int, members: Sequence[str], start_at: float, end_at: float) -> Sequence[Fault]:
    """Draw a pause of all members together in every eighth run, as where a machine is moved, from its own random
    numbers."""
    draw = Random(f"{seed}/pauses")
    if draw.random() > 1 / 8:
        return []
    at, for_s = draw.uniform(start_at, end_at), draw.uniform(0.5, 40.0)
    return [Freeze(at, member, for_s) for member in members]


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
    return (*faults, *_slow_disks(seed, start_at, end_at), *_torn_writes(seed, start_at, end_at))


def _slow_disks(seed: int, start_at: float, end_at: float) -> Sequence[Fault]:
    """Draw slow disks in half of the runs with jobs, some with a death of the runner, from their own random numbers,
    which leave out the seeds that tests name."""
    draw = Random(f"{seed}/slow disks/161120")
    if draw.random() > 1 / 2:
        return []
    faults: list[Fault] = []
    for _ in range(draw.randint(2, 4)):
        at, for_s = draw.uniform(start_at, end_at), draw.uniform(0.5, 9.0)
        faults.append(SlowDisk(at, draw.choice((0.02, 0.3, 3.0)), for_s))
        faults += [_death(draw, JOBS, at + draw.uniform(0.0, for_s))] if draw.random() < 0.5 else []
    return faults


def _torn_writes(seed: int, start_at: float, end_at: float) -> Sequence[Fault]:
    """Draw deaths of the runner as it writes in half of the runs with jobs, as slow disks are drawn."""
    draw = Random(f"{seed}/torn writes/146")
    if draw.random() > 1 / 2:
        return []
    return [
        TornWrite(draw.uniform(start_at, end_at), draw.random() < 0.5, draw.choice((0.05, 0.5, 2.0)))
        for _ in range(draw.randint(2, 4))
    ]


def _workers(members: Sequence[str]) -> Sequence[str]:
    return [member for member in members if _role(member) in ("prefill", "decode")] or members


def _skew(draw: Random, members: Sequence[str], at: float) -> Sequence[Fault]:
    """Draw a clock that is wrong from the start, or from the member's next life on."""
    return [Skew(draw.choice((0.0, at)), draw.choice(members), draw.uniform(-5.0, 5.0))]


_DEATHS: Sequence[_Drawn] = (_kill, _kill_together, _kill_again, _freeze, _mute, _unheard)
_FRAMES: Sequence[_Drawn] = (_drop, _drop, _drop, _duplicate, _slow, _slow, _reorder, _reorder)  # most links are idle
_CLOCKS: Sequence[_Drawn] = (_slow_worker, _slow_worker, _skew)
_DRAWN = (*_DEATHS, *_FRAMES, *_CLOCKS)
