"""The number of workers follows the load: it grows soon, shrinks slowly, and does not oscillate."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.config.topology import Range
from alignedserve.core import Role
from alignedserve.protocol.commands import Scale
from alignedserve.router.placing.admission import Admission, Queues
from alignedserve.router.placing.placement import Placement
from alignedserve.router.sizing import LOOK_S, START_S, Sizes, Sizing, WorkerDemand, demands
from alignedserve.scheduling.policy import DEFAULT_POLICY
from tests.samples import member, request


def sizing(least: int = 1, most: int = 8) -> Sizing:
    return Sizing(Sizes({Role.DECODE: Range(least, most)}, grow_after_s=3, shrink_after_s=60))


class Deployment:
    """Follow the requested number: workers come after `start_s`, and leave at once."""

    def __init__(self, of: Sizing, workers: int = 1, start_s: float = 10.0) -> None:
        self.sizing, self.workers, self.start_s, self.now = of, workers, start_s, 100.0
        self.coming: list[float] = []
        self.asked: list[tuple[float, int]] = []

    def run(self, seconds: float, demand: Callable[[int], tuple[float, float]]) -> None:
        """Run for some seconds; `demand` maps the number of workers to load and pressure."""
        end_at = self.now + seconds
        while self.now < end_at:
            self.now += LOOK_S
            self.workers += sum(at <= self.now for at in self.coming)
            self.coming = [at for at in self.coming if at > self.now]
            scale = self.sizing.look({Role.DECODE: WorkerDemand(self.workers, *demand(self.workers), "why")}, self.now)
            if scale is not None:
                self._scale(scale)

    def _scale(self, scale: Scale) -> None:
        assert scale.prefill is None
        assert scale.decode is not None
        self.asked.append((self.now, scale.decode))
        there = self.workers + len(self.coming)
        self.coming += [self.now + self.start_s] * (scale.decode - there)
        if scale.decode < self.workers:
            self.workers = scale.decode
            self.sizing.retires(Role.DECODE, self.workers)

    @property
    def counts(self) -> list[int]:
        return [count for _, count in self.asked]


def loaded(workers_worth: float) -> Callable[[int], tuple[float, float]]:
    """Return the demand of so much work, of which each worker carries 1."""
    return lambda workers: (workers_worth, workers_worth / workers)


def constantly(load: float, pressure: float) -> Callable[[int], tuple[float, float]]:
    return lambda _: (load, pressure)


def test_as_many_as_the_load_takes_and_no_more() -> None:
    deployment = Deployment(sizing())
    deployment.run(300, loaded(3.5))
    assert deployment.counts == [2, 4]
    assert deployment.asked[0][0] == 100.0 + LOOK_S + 3, "as soon as they were pressed for so long"
    assert deployment.asked[1][0] >= deployment.asked[0][0] + deployment.start_s, "when those that come are there"


def test_no_more_for_a_moment_of_pressure() -> None:
    deployment = Deployment(sizing())
    for _ in range(20):
        deployment.run(2, loaded(2.0))
        deployment.run(1, loaded(0.5))
    assert deployment.asked == []


def test_a_single_worker_leaves_at_a_time_when_the_others_have_room_to_spare() -> None:
    deployment = Deployment(sizing(), workers=4)
    deployment.run(59, loaded(0.5))
    assert deployment.asked == []
    deployment.run(600, loaded(0.5))
    assert deployment.counts == [3, 2, 1]
    times = [at for at, _ in deployment.asked]
    assert all(later - earlier >= 60 for earlier, later in itertools.pairwise(times))


def test_a_worker_that_left_is_not_called_back_by_the_load_that_was_there_all_along() -> None:
    """Workers are pressed at a load of a tenth each: pressure on memory differs from the load that they carry."""
    deployment = Deployment(sizing())
    deployment.run(900, lambda workers: (0.15, 0.15 / (0.1 * workers)))
    assert deployment.counts == [2], "one is pressed with it, two are not: it stays at two"
    deployment.run(900, lambda workers: (0.15, 0.15 / (0.1 * workers)))
    assert deployment.counts == [2, 1, 2], "now and then one is tried again"


def test_what_was_learnt_is_forgotten_slowly() -> None:
    deployment = Deployment(sizing())
    deployment.run(60, lambda workers: (0.05, 1.5 / workers))  # the pressure has another cause than the load
    assert deployment.workers == 2
    deployment.run(60 * 60, lambda _: (0.05, 0.1))
    assert deployment.workers == 1


def test_next_to_nothing_to_do_under_pressure_teaches_next_to_nothing() -> None:
    """An example is a single chat that no worker could have served in time."""
    deployment = Deployment(sizing(most=4))
    deployment.run(300, constantly(5e-324, 1e9))
    assert deployment.counts == [2, 4]


def test_workers_that_do_not_come_are_not_waited_for_forever() -> None:
    deployment = Deployment(sizing(), start_s=1e9)
    deployment.run(START_S - 1, loaded(2.5))
    assert deployment.counts == [2]
    deployment.run(START_S + 10, loaded(2.5))
    assert deployment.counts == [2, 2], "the launcher has it already, and goes on as it is"


def test_a_user_who_scales_is_heard() -> None:
    deployment = Deployment(sizing(), workers=4)
    deployment.run(30, loaded(2.0))
    deployment.workers = 2  # `alignedserve scale --decode 2`
    deployment.sizing.retires(Role.DECODE, 2)
    deployment.run(30, loaded(1.5))
    assert deployment.asked == []
    deployment.run(10, loaded(2.4))
    assert deployment.counts == [3]


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.floats(0.5, 60),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3), st.floats(5, 200)), max_size=12),
)
def test_never_beyond_what_it_may_be(
    least: int, more: int, start_s: float, phases: list[tuple[float, float, float]]
) -> None:
    deployment = Deployment(sizing(least, least + more), workers=least, start_s=start_s)
    for load, pressure, seconds in phases:
        deployment.run(seconds, constantly(load, pressure))
    assert all(least <= count <= least + more for count in deployment.counts)
    assert least <= deployment.workers <= least + more


def test_prefill_workers_that_decode_are_counted_with_the_memory_that_requests_want_there() -> None:
    """Three workers hold 4,800 tokens, and 3,600 are wanted: no worker is to leave, though no prompt waits."""
    placement = Placement(DEFAULT_POLICY, block_size=16, kv_tokens=1600, lends=True)
    for name in ("prefill-0", "prefill-1", "decode-0"):
        placement.add_worker(replace(member(name), role=Role.DECODE, lends=name.startswith("prefill")))
    admission = Admission(DEFAULT_POLICY, most_open=100, queues=Queues())
    for number in range(8):
        admission.opened(request(f"{number}", prompt=449, max_tokens=1))
    loads = {role: of.load for role, of in demands((), placement, admission, 60.0, 100.0).items()}
    assert loads == pytest.approx({Role.PREFILL: 2 * 0.75, Role.DECODE: 0.75}, rel=0.01)
