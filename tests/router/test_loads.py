"""The least loaded worker is found without looking at all workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.router.placing.rooms import Loads

WORKERS = st.sampled_from(["decode-0", "decode-1", "decode-2"])
PUT = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3), WORKERS)


@given(st.lists(PUT | WORKERS, max_size=200))
def test_it_is_the_least_of_what_each_has_now(changes: list[tuple[float, int, str] | str]) -> None:
    """A change that is only a name removes that worker."""
    loads, now = Loads(), dict[str, tuple[float, int, str]]()
    for change in changes:
        if isinstance(change, str):
            loads.remove(change)
            now.pop(change, None)
        else:
            loads.put(change)
            now[change[2]] = change
        assert loads.least() == (min(now.values())[2] if now else None)
