"""The worker that takes the next prompt is found without looking at all workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.router.placing.ranking import Least, Loads

WORKERS = st.sampled_from(["decode-0", "decode-1", "decode-2"])
Put = tuple[float, int, str]  # (when the worker is through, tokens that its requests hold, worker)
PUT = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3), WORKERS)
LOAD = st.tuples(st.integers(0, 100).map(lambda tenths: tenths / 10), st.integers(0, 3), WORKERS)
SECONDS = st.integers(0, 20).map(lambda tenths: tenths / 10)


@given(st.lists(PUT | WORKERS, max_size=200))
def test_it_is_the_least_of_what_each_has_now(changes: list[Put | str]) -> None:
    """A change that is only a name removes that worker."""
    least, there = Least(), dict[str, Put]()
    for change in changes:
        if isinstance(change, str):
            least.remove(change)
            there.pop(change, None)
        else:
            least.put(change)
            there[change[2]] = change
        assert least.least() == (min(there.values())[2] if there else None)
        assert least.first() == (min(there.values()) if there else None)


@given(st.lists(LOAD | WORKERS | SECONDS, max_size=200))
def test_an_idle_worker_that_holds_least_comes_first_else_the_worker_that_is_through_first(
    changes: list[Put | str | float],
) -> None:
    """A change that is only a name removes that worker; a change that is a number lets so many seconds pass."""
    loads, there, now = Loads(), dict[str, Put](), 0.0
    for change in changes:
        if isinstance(change, str):
            loads.remove(change)
            there.pop(change, None)
        elif isinstance(change, tuple):
            through_at, tokens, worker = change
            loads.put(worker, through_at, tokens)
            there[worker] = change
        else:
            now += change
        idle = [(tokens, worker) for through_at, tokens, worker in there.values() if through_at <= now + 0.25]
        expected = min(idle)[1] if idle else min(there.values())[2] if there else None
        assert loads.least(now) == expected


class TestTime:
    def loads(self, *workers: Put) -> Loads:
        loads = Loads()
        for through_at, tokens, worker in workers:
            loads.put(worker, through_at, tokens)
        return loads

    def test_a_worker_becomes_idle_as_time_passes(self) -> None:
        loads = self.loads((1.0, 900, "prefill-0"), (3.0, 10, "prefill-1"))
        assert loads.least(0.0) == "prefill-0", "both are busy, and it is through first"
        assert loads.least(1.0) == "prefill-0", "it alone is idle"
        assert loads.least(3.0) == "prefill-1", "both are idle, and it holds less"

    def test_an_idle_worker_with_new_work_is_busy_again(self) -> None:
        loads = self.loads((0.0, 10, "prefill-0"), (0.0, 900, "prefill-1"))
        assert loads.least(0.0) == "prefill-0"
        loads.put("prefill-0", 2.0, 20)
        assert loads.least(0.0) == "prefill-1"

    def test_of_workers_through_at_about_the_same_time_the_worker_that_holds_least(self) -> None:
        assert self.loads((2.01, 900, "prefill-0"), (2.04, 10, "prefill-1")).least(0.0) == "prefill-1"

    def test_a_wait_that_is_as_good_as_none_is_idle(self) -> None:
        assert self.loads((0.2, 10, "prefill-0"), (0.0, 900, "prefill-1")).least(0.0) == "prefill-0"
        assert self.loads((0.4, 10, "prefill-0"), (0.0, 900, "prefill-1")).least(0.0) == "prefill-1"
