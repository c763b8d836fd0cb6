"""Decides which deployments to simulate next, and which is the answer: the cheapest that keeps its promises.

    while trials := search.wanted():
        for trial in trials:
            search.hear(trial, simulate(trial))
    search.answer

Larger deployments of a family keep what smaller ones keep, so each family is bisected, from its likely size on. The
cheapest deployment found so far bounds all families: what costs as much is never simulated, and the largest size that
costs less decides a family with one simulation if it fails.

When nothing cheaper is left, the answer and its neighbours are simulated on fresh seeds. These outweigh what the search
saw: if the answer fails there, or a cheaper neighbour keeps its promises, the search goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alignedserve.lab.planning.deployments import DeploymentFamily, PlannedDeployment
from alignedserve.lab.planning.outcome import Outcome, PromisesToKeep

_MOST_AT_ONCE, _LEAST_AT_ONCE = 4, 2  # families in a round of simulations; constants, so that cores do not change it
_NEAR = 1.3  # times the cheapest: what is probably dearer waits until a price bounds it


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """A simulation that the search wants."""

    deployment: PlannedDeployment
    seed: int
    is_whole: bool = False  # whether it may not end early where it is hopeless: it says by how much it fails
    load: float = 1.0  # times the workload's


class Search:
    def __init__(
        self, families: Sequence[DeploymentFamily], promise: PromisesToKeep, most: int, seed: int, fresh: Sequence[int]
    ) -> None:
        """Search sizes of up to `most` workers with one seed, and check the answer with the fresh seeds."""
        self.families, self._promise, self._most = families, promise, most
        self.seed, self.fresh = seed, tuple(fresh)
        self.found: dict[PlannedDeployment, dict[int, Outcome]] = {}  # by seed
        self._order = {family.offer: number for number, family in reversed([*enumerate(families)])}

    # --- What to simulate

    def wanted(self) -> list[PlanTrial]:
        """Return the trials of the next round; none if the search has ended."""
        return self._searching() or self._checking()

    def num_left(self) -> int:
        """Return about how many trials are still wanted: each family is halved until one size is left, then the answer
        and a cheaper neighbour are checked on all fresh seeds, and a dearer one on one."""
        open_sizes = [
            min(self._highest(family), self._most if holding is None else holding - 1) - failing
            for family in self.families
            for failing, holding in [self._limits(family)]
        ]
        searching = sum(max(0, sizes).bit_length() for sizes in open_sizes)
        may_be_checked = 2 * len(self.fresh) + 1 if searching and self.answer is None else 0
        return searching + may_be_checked + len(self._checking())

    def hear(self, trial: PlanTrial, outcome: Outcome) -> None:
        self.found.setdefault(trial.deployment, {})[trial.seed] = outcome

    def _searching(self) -> list[PlanTrial]:
        probes = [(family, size) for family in self.families if (size := self._next_size(family)) is not None]
        probes.sort(key=lambda probe: probe[0].of_size(probe[1]).price)
        near = [probe for probe in probes if _price(probe) <= _NEAR * _price(probes[0])][:_MOST_AT_ONCE]
        if len(near) < _LEAST_AT_ONCE:
            near += [(family, size - 1) for family, size in near if self._is_open(family, size - 1)]
        return [PlanTrial(family.of_size(size), self.seed, size == self._most) for family, size in near]

    def _checking(self) -> list[PlanTrial]:
        answer = self.answer
        if answer is None:
            return []
        around = [answer, *(other for other in answer.neighbours if other.size <= self._most)]
        return [
            PlanTrial(deployment, seed)
            for deployment in around
            for seed in (self.fresh if deployment.price <= answer.price else self.fresh[:1])
            if seed not in self.found.get(deployment, {})
        ]

    def _next_size(self, family: DeploymentFamily) -> int | None:
        """Return the size to simulate next; None if nothing of the family can change the answer."""
        failing, holding = self._limits(family)
        top = min(self._highest(family), self._most if holding is None else holding - 1)
        if failing >= top:
            return None
        tried = [size for size in self._sizes(family) if self.holds(family.of_size(size)) is not None]
        if not tried:
            size = family.likely
        elif holding is None:
            size = failing + (1 << len(tried) >> 1)
        elif failing < family.least:
            size = holding - (1 << len(tried) >> 1)
        else:
            size = (failing + holding) // 2
        return min(top, max(failing + 1, size))

    def _is_open(self, family: DeploymentFamily, size: int) -> bool:
        failing, _ = self._limits(family)
        return size > failing and self.holds(family.of_size(size)) is None

    def _limits(self, family: DeploymentFamily) -> tuple[int, int | None]:
        """Return the largest size that fails, and the smallest larger size that holds."""
        held = {size: self.holds(family.of_size(size)) for size in self._sizes(family)}
        failing = max([family.least - 1, *(size for size, holds in held.items() if holds is False)])
        return failing, min((size for size, holds in held.items() if holds and size > failing), default=None)

    def _sizes(self, family: DeploymentFamily) -> range:
        return range(1 if family.prompt_share is None else 2, self._most + 1)

    def _highest(self, family: DeploymentFamily) -> int:
        """Return the largest size that is cheaper than the answer so far."""
        best = self.answer
        if best is None:
            return self._most
        cheaper = [size for size in self._sizes(family) if family.of_size(size).price < best.price]
        return max(cheaper, default=0)

    # --- What was found

    @property
    def answer(self) -> PlannedDeployment | None:
        """Return the cheapest deployment that was found to keep its promises."""
        held = [deployment for deployment in self.found if self.holds(deployment)]
        return min(held, key=self._rank, default=None)

    def _rank(self, deployment: PlannedDeployment) -> tuple[float, int, int, int]:
        """Rank by price; where that is the same, by the user's order and with few prefill workers first."""
        prompts = deployment.topology.prefill_workers
        return deployment.price, self._order[deployment.offer], prompts, deployment.size

    @property
    def is_checked(self) -> bool:
        return self.answer is not None and not self._checking()

    def outcomes(self, deployment: PlannedDeployment) -> list[Outcome]:
        """Return the outcomes that count: those of fresh seeds, where there are any."""
        found = self.found.get(deployment, {})
        return [found[seed] for seed in self.fresh if seed in found] or [found[seed] for seed in found]

    def holds(self, deployment: PlannedDeployment) -> bool | None:
        """Return whether the deployment keeps its promises; None if it is not known."""
        outcomes = self.outcomes(deployment)
        return not self._promise.shortfalls(outcomes) if outcomes else None

    def of_family(self, family: DeploymentFamily) -> Mapping[int, list[Outcome]]:
        """Return the outcomes of each size that was simulated."""
        found = {size: self.outcomes(family.of_size(size)) for size in self._sizes(family)}
        return {size: outcomes for size, outcomes in found.items() if outcomes}


def _price(probe: tuple[DeploymentFamily, int]) -> float:
    family, size = probe
    return family.of_size(size).price
