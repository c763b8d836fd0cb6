"""Whatever dies, is lost or comes late: every accepted request ends with exactly its tokens, and nothing leaks.

Frames are dropped between workers and owners only: that is where a lost frame is asked for again. On the
other links they are not lost but with the process at their end.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.config import Topology
from alignedserve.core import Role
from alignedserve.prefill_worker.state import WorkerLimits
from alignedserve.simulator.faults import Drop, Fault, Kill, Slow
from alignedserve.simulator.run import Settings, members_of, simulate, with_faults
from alignedserve.simulator.workload import Workload
from tests.conftest import SOAK

LIMITS = WorkerLimits(num_pairs=40, block_size=16, page_size=64, max_step_tokens=64, max_batch=4)
FROM_S, TO_S = 1.5, 4.0  # from before the first arrival until long after

generated = settings(
    max_examples=5_000 if SOAK else 25,
    derandomize=not SOAK,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def deployment(seed: int, topology: str) -> Settings:
    workload = Workload(num_requests=15, rate=20.0, leaving_share=0.15)
    return Settings(seed, Topology.parse(topology), workload=workload, limits=LIMITS, num_pages=12, most_s=300.0)


topologies = st.sampled_from(["colocated", "1+1", "2+1", "1+2", "2+2"])
times = st.floats(FROM_S, TO_S)


def schedules(of: Settings) -> st.SearchStrategy[tuple[Fault, ...]]:
    members = members_of(of)
    names, owners = st.sampled_from(list(members)), [name for name in members if members[name] is Role.GATEWAY]
    workers = [name for name in members if members[name] in (Role.PREFILL, Role.DECODE)]
    kill = st.builds(Kill, times, names, st.floats(0.05, 2.0), st.booleans())
    drop = st.builds(Drop, times, st.sampled_from(workers), st.sampled_from(owners), st.integers(1, 5))
    slow = st.builds(Slow, times, names, names, st.floats(0.001, 0.5), st.floats(0.1, 2.0))
    return st.lists(st.one_of(kill, drop, slow), max_size=6).map(tuple)


def check(of: Settings) -> None:
    summary = simulate(of)
    assert summary.problems == (), of.faults
    assert summary.num_unfinished == 0


@generated
@given(st.data(), st.integers(0, 1 << 30), topologies)
def test_any_schedule_of_faults(data: st.DataObject, seed: int, topology: str) -> None:
    without = deployment(seed, topology)
    check(replace(without, faults=data.draw(schedules(without))))


@generated
@given(st.integers(0, 1 << 30), topologies, st.integers(1, 6))
def test_any_seed(seed: int, topology: str, count: int) -> None:
    check(with_faults(deployment(seed, topology), count, FROM_S, TO_S))


@pytest.mark.parametrize("seen", [True, False], ids=["seen by the launcher", "silent"])
@pytest.mark.parametrize("member", ["router", "pool-0", "prefill-0", "decode-0", "gateway-0"])
def test_each_member_may_die_amid_its_work(member: str, seen: bool) -> None:
    of = replace(deployment(1, "1+1"), workload=Workload(num_requests=30, rate=50.0))
    check(replace(of, faults=(Kill(2.3, member, 0.3, seen), Kill(4.5, member, 1.0, seen))))


def test_the_owner_notices_a_last_frame_that_is_lost() -> None:
    """No later frame tells of it."""
    of = replace(deployment(1, "colocated"), workload=Workload(num_requests=1))
    check(replace(of, faults=(Drop(2.0, "decode-0", "gateway-0", frames=1000),)))


def test_a_fault_is_replayed_from_its_seed() -> None:
    of = with_faults(deployment(5, "2+2"), 6, FROM_S, TO_S)
    assert with_faults(deployment(5, "2+2"), 6, FROM_S, TO_S) == of
    assert simulate(of).digest == simulate(of).digest
