"""Compute how many workers of a kind the load needs: the router asks for more soon, and for fewer slowly.

    pressure   how near promises are to being missed; at 1 and above the workers miss some
    load       how much work there is, in workers

    pressure of 1 for `grow_after_s`      ask for as many more as the load needs: at least one, at most twice as many
    no pressure for `shrink_after_s`      ask for one less, if the others carry the load with room to spare

A worker carries a load of 1, or less where workers were under pressure at less. The router learns that whenever it
happens, and forgets a twentieth of it in each window. Otherwise a worker that left would be asked for again as soon as
it has left, over and over.

New workers have to load a model first, on machines that may have to start. Until they have come, or START_S has
passed, the router asks for no more.

What there is to do, and how near promises are to being missed, as the router sees it:

    workers   figure    is the largest of
    prefill   load      the number of workers that have a prompt;
                        where they decode too, their part of the memory that decode workers' load is of
              pressure  the next chat's predicted wait for other prompts / (half of the ttft);
                        the mean time that chats have waited / the ttft;
                        the predicted wait of best-effort prompts / `be_wait_s`
    decode    load      the memory that open requests will need, as predicted / the memory of a worker
              pressure  the memory that chats alone will need / the memory of all workers;
                        the share of chats with a late next token / MOST_LATE;
                        the predicted wait of best-effort requests in the pool / `be_wait_s`

Colocated workers have a decode worker's load, and the pressures of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

from alignedserve.core import WORKERS, Request, Role, ServiceClass
from alignedserve.protocol.commands import Scale
from alignedserve.router.lifecycle import OpenRequest, State
from alignedserve.router.placing.admission import Admission
from alignedserve.router.placing.placement import Placement

if TYPE_CHECKING:
    from alignedserve.config.topology import Range  # of the settings, which no core loads

LOOK_S = 1.0  # between two looks at the load
START_S = 120.0  # a worker that was asked for and has not come by then will not come
MOST_TIMES = 2.0  # the number of workers grows by this factor at most
PRESSED_SHARE_OF_TTFT = 0.5  # a chat's wait for other prompts: from there on there is pressure
MOST_LATE = 0.1  # share of the chats that decode: from there on there is pressure
_FULL = 0.8  # share of what workers carry that they should have after growing
_SPARE = 0.7  # share of what workers carry that the remaining ones may have after shrinking
_LEAST = 0.01  # least load that a worker is taken to carry
_FORGOTTEN = 1.05  # factor by which what workers carry rises in each window without pressure


@dataclass(frozen=True, slots=True)
class Sizes:
    """The least and the most workers of each role; a role that is not named keeps its number."""

    ranges: Mapping[Role, Range] = field(default_factory=dict)
    grow_after_s: float = 3.0
    shrink_after_s: float = 300.0
    be_wait_s: float = 60.0  # predicted wait of best-effort requests from which there is pressure


@dataclass(frozen=True, slots=True)
class WorkerDemand:
    """The work for the workers of one role."""

    workers: int  # present, and not about to leave
    load: float = 0.0
    pressure: float = 0.0
    why: str = ""  # cause of the pressure, in words


class Sizing:
    """Decides from the demand, once in a while, how many workers there should be."""

    def __init__(self, sizes: Sizes) -> None:
        self._kinds = {role: _RoleSize(between, sizes) for role, between in sizes.ranges.items()}

    @property
    def is_on(self) -> bool:
        return bool(self._kinds)

    def look(self, demands: Mapping[Role, WorkerDemand], now: float) -> Scale | None:
        """Return how the numbers of workers should change, or None."""
        changes = {role: kind.look(demands[role], now) for role, kind in self._kinds.items()}
        wanted = {role: change for role, change in changes.items() if change is not None}
        if not wanted:
            return None
        counts = {role: count for role, (count, _) in wanted.items()}
        why = "; ".join(f"{role.value}: {why}" for role, (_, why) in wanted.items())
        return Scale(counts.get(Role.PREFILL), counts.get(Role.DECODE), why)

    def retires(self, role: Role, left: int) -> None:
        """Note that one worker of the role leaves, whoever asked for that, and how many are left."""
        if role in self._kinds:
            self._kinds[role].wanted = left


class _RoleSize:
    def __init__(self, between: Range, sizes: Sizes) -> None:
        self._between, self._sizes = between, sizes
        self.wanted = 0  # workers that are present or were asked for
        self._asked_at = -inf
        self._carries = 1.0  # load that one worker carries
        self._pressed_since: float | None = None  # since when there is pressure
        self._most_load = 0.0  # largest load since then
        self._eased_since: float | None = None  # since when there is no pressure with this number of workers
        self._load, self._looked_at = 0.0, 0.0  # moving mean of the load, and when it was updated

    def look(self, demand: WorkerDemand, now: float) -> tuple[int, str] | None:
        """Return how many workers there should be, and why; None for no change."""
        kept = exp(-4 * (now - self._looked_at) / self._sizes.shrink_after_s) if self._looked_at else 0.0
        self._load, self._looked_at = kept * self._load + (1 - kept) * demand.load, now
        self.wanted = max(self.wanted, demand.workers)
        if demand.workers < self.wanted:
            if now - self._asked_at >= START_S:
                self.wanted = demand.workers  # the missing workers will not come: go on with those that are present
            self._pressed_since = self._eased_since = None
            return None
        if not demand.workers:
            return None
        count, why = self._more(demand, now) if demand.pressure >= 1 else self._fewer(demand, now)
        if count == demand.workers:
            return None
        self.wanted, self._asked_at = count, now
        self._pressed_since = self._eased_since = None
        return count, why

    def _more(self, demand: WorkerDemand, now: float) -> tuple[int, str]:
        self._eased_since, num = None, demand.workers
        if self._pressed_since is None:
            self._pressed_since, self._most_load = now, 0.0
        self._most_load = max(self._most_load, demand.load)
        if now - self._pressed_since < self._sizes.grow_after_s:
            return num, ""
        if self._most_load:
            self._carries = max(_LEAST, min(self._carries, self._most_load / num / demand.pressure))
        by_load = self._most_load / (self._carries * _FULL)
        count = max(num + 1, ceil(min(MOST_TIMES * num, max(by_load, num * demand.pressure))))
        return self._between.nearest(count), demand.why

    def _fewer(self, demand: WorkerDemand, now: float) -> tuple[int, str]:
        self._pressed_since, num = None, demand.workers
        if self._eased_since is None:
            self._eased_since = now
        if now - self._eased_since < self._sizes.shrink_after_s:
            return num, ""
        self._eased_since = now
        if self._load <= _SPARE * self._carries * (num - 1):
            return self._between.nearest(num - 1), f"a load of {self._load:.2f} needs no more"
        self._carries = min(1.0, self._carries * _FORGOTTEN)
        return num, ""


_Pressure: TypeAlias = tuple[float, str]  # how much, and why


def demands(
    opened: Iterable[OpenRequest], placement: Placement, admission: Admission, be_wait_s: float, now: float
) -> Mapping[Role, WorkerDemand]:
    by_state = defaultdict[State, list[OpenRequest]](list)
    for each in opened:
        by_state[each.state].append(each)
    num_prefill, num_decode = map(placement.num_workers, WORKERS)
    runs_prompts = Role.PREFILL if num_prefill else Role.DECODE
    prompts = [each.request for state in (State.WAITING, State.PREFILL) for each in by_state[state]]
    for_prompts = _pressures_of_prompts(prompts, runs_prompts, placement, be_wait_s, now)
    for_decodes = _pressures_of_decodes(by_state[State.POOL], placement, admission, be_wait_s, now)
    of_decode_workers = for_decodes if num_prefill else [*for_prompts, *for_decodes]
    wanted = admission.holdings.tokens / placement.memory if placement.memory else 0.0  # of all workers that decode
    of_prompts = max(placement.num_with_prompts(now), wanted * placement.num_lent)
    return {
        Role.PREFILL: WorkerDemand(num_prefill, of_prompts, *max(for_prompts)),
        Role.DECODE: WorkerDemand(num_decode, wanted * num_decode, *max(of_decode_workers)),
    }


def _pressures_of_prompts(
    prompts: Sequence[Request], role: Role, placement: Placement, be_wait_s: float, now: float
) -> list[_Pressure]:
    chats = [request for request in prompts if request.service is ServiceClass.RT and not request.emitted]
    rt_s, be_s = (placement.least_wait_s(role, service, now) for service in (ServiceClass.RT, ServiceClass.BE))
    has_be = any(request.service is ServiceClass.BE for request in prompts)
    found = [(be_s / be_wait_s if has_be else 0.0, f"best-effort prompts will wait {be_s:.1f} s")]
    if chats:
        least_s = min(chat.slo.ttft_s for chat in chats)
        mean = fmean(max(0.0, now - chat.arrival_at) / chat.slo.ttft_s for chat in chats)
        found.append((rt_s / (PRESSED_SHARE_OF_TTFT * least_s), f"the next chat's prompt will wait {rt_s:.2f} s"))
        found.append((mean, f"chats have waited {mean:.1f} times their ttft for a first token"))
    return found


def _pressures_of_decodes(
    handed_on: Sequence[OpenRequest], placement: Placement, admission: Admission, be_wait_s: float, now: float
) -> list[_Pressure]:
    chats = [opened for opened in handed_on if opened.request.service is ServiceClass.RT]
    num_rt, num_late = placement.late
    num_rt += len(chats)
    num_late += sum(now - opened.moved_at > opened.request.slo.tbt_s for opened in chats)
    share = num_late / num_rt if num_rt else 0.0
    found = [(share / MOST_LATE, f"{num_late} of {num_rt} chats are late with their next token")]
    if placement.memory:
        wanted = admission.holdings.rt_tokens / placement.memory
        num_workers = placement.num_workers(Role.DECODE)
        found.append((wanted, f"chats want {wanted:.0%} of the memory of {num_workers} workers"))
    if rate := admission.ends.rate(now):
        wait_s = (len(handed_on) - len(chats)) / rate
        found.append((wait_s / be_wait_s, f"best-effort requests will wait {wait_s:.0f} s in the pool"))
    return found
