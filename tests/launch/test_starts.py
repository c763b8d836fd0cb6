"""Which parts stand still while a deployment starts, by a clock that the tests move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.launch.starts import SILENT, Starts
from alignedserve.signs import Sign, Stage

QUIET_S, EACH_S = 120.0, 5.0
GB = 10**9


def started(*parts: str, now: float = 0.0) -> Starts:
    starts = Starts(QUIET_S, now)
    for part in parts:
        starts.begin(part, 1, now)
        starts.hear(Sign(part, 1, Stage.LIBRARIES), now)
    return starts


def cold_start(part: str, gigabytes: int, gb_s: float) -> Iterator[tuple[float, Sign]]:
    """Yield what a worker on a GPU says while it starts, each with its time."""
    now = 40.0  # torch and the driver
    for done in range(1, gigabytes + 1):
        now += 1 / gb_s
        yield now, Sign(part, 1, Stage.WEIGHTS, done * GB, gigabytes * GB)
    for done in range(1, 11):
        now += 12.0
        yield now, Sign(part, 1, Stage.KERNELS, done, 10)
    for done in range(1, 36):
        now += 0.3
        yield now, Sign(part, 1, Stage.GRAPHS, done, 35)
    yield now + 60.0, Sign(part, 1, Stage.STEPS)
    yield now + 90.0, Sign(part, 1, Stage.RUNS)


def still_at(starts: Starts, said: Iterator[tuple[float, Sign]]) -> float | None:
    """Return when something stood still for too long, if it did; it is looked at every few seconds."""
    now = 0.0
    for at, sign in said:
        while now < at:
            if starts.still(now) is not None:
                return now
            now += EACH_S
        starts.hear(sign, at)
    return None


@pytest.mark.parametrize(
    ("gigabytes", "gb_s", "least_s"),
    [(60, 0.1, 600.0), (141, 1.0, 330.0), (810, 0.25, 3_000.0)],
    ids=["a load of ten minutes", "a 70B", "a 405B from a slow disk"],
)
def test_a_start_may_take_any_time_while_it_moves(gigabytes: int, gb_s: float, least_s: float) -> None:
    said = list(cold_start("decode-0", gigabytes, gb_s))
    assert said[-1][0] > least_s
    starts = started("decode-0")
    assert still_at(starts, iter(said)) is None
    starts.is_open = True
    assert starts.is_over


def test_what_stands_still_is_named_with_its_stage_and_how_long() -> None:
    starts = started("decode-0", "prefill-0")
    weights = Sign("decode-0", 1, Stage.WEIGHTS, 3_100_000_000, 16_060_000_000)
    starts.hear(weights, 10.0)
    for now in range(0, 130, 5):  # it says the same again and again, and another part moves
        starts.hear(weights, float(now))
        starts.hear(Sign("prefill-0", 1, Stage.WEIGHTS, now, 16), float(now))
    assert starts.still(129.9) is None
    still = starts.still(130.0)
    assert still is not None
    assert still.sign == weights
    assert str(still) == "decode-0 reads weights (3.1 of 16.1 GB), and nothing has moved there for 120 s"


@pytest.mark.parametrize("hangs", ["decode-0", "decode-1"])
def test_a_part_may_wait_for_its_turn_as_long_as_it_says_so(hangs: str) -> None:
    """Workers of a node measure steps one after the other."""
    starts = started("decode-0", "decode-1")
    stages = {"decode-0": Stage.STEPS, "decode-1": Stage.TURN}
    for now in range(0, 1100, 100):  # less than QUIET_S apart, for much longer than that
        for part, stage in stages.items():
            if part != hangs or now <= 900:
                starts.hear(Sign(part, 1, stage, now + 1), float(now))
        assert starts.still(float(now + 10)) is None
    still = starts.still(1020.0)
    assert still is not None
    assert still.sign is not None
    assert still.sign.part == hangs


def test_parts_that_all_wait_do_so_in_vain() -> None:
    starts = started("decode-0", "decode-0-rank-1")
    starts.hear(Sign("decode-0", 1, Stage.RANKS), 5.0)
    starts.hear(Sign("decode-0-rank-1", 1, Stage.RANKS), 9.0)
    assert starts.still(128.0) is None
    still = starts.still(130.0)
    assert still is not None
    assert still.sign == Sign("decode-0", 1, Stage.RANKS)


def test_ranks_that_wait_for_one_another_are_found_though_the_deployment_serves() -> None:
    """One of them hangs in the first step, which all ranks run together."""
    starts = started("decode-0", "prefill-0", "prefill-0-rank-1")
    starts.hear(Sign("decode-0", 1, Stage.RUNS), 1.0)
    starts.is_open = True
    starts.hear(Sign("prefill-0", 1, Stage.RANKS), 5.0)
    starts.hear(Sign("prefill-0-rank-1", 1, Stage.WEIGHTS, 1, 9), 100.0)
    assert starts.still(100.0 + QUIET_S - 1.0) is None, "rank 0 waits for rank 1, which reads weights"
    starts.hear(Sign("prefill-0-rank-1", 1, Stage.RANKS), 200.0)
    assert starts.still(200.0 + QUIET_S - 1.0) is None, "the last one has just come"
    still = starts.still(200.0 + QUIET_S)
    assert still is not None
    assert still.sign == Sign("prefill-0", 1, Stage.RANKS)

    starts.begin("prefill-0-rank-1", 2, 400.0)  # it waits for a node
    assert starts.still(1e6) is None


def test_parts_that_run_and_take_no_request_are_not_waited_for_either() -> None:
    starts = started("gateway-0")
    starts.hear(Sign("gateway-0", 1, Stage.RUNS), 10.0)
    assert starts.still(129.0) is None
    still = starts.still(130.0)
    assert still is not None
    assert still.sign is None
    assert str(still).startswith("no request is taken")


def test_a_deployment_that_serves_may_be_quiet_and_wait_for_a_node() -> None:
    starts = started("decode-0")
    starts.hear(Sign("decode-0", 1, Stage.RUNS), 10.0)
    starts.is_open = True
    assert starts.still(1e6) is None
    starts.begin("decode-1", 1, 1e6)  # no node has room for it
    assert starts.still(2e6) is None
    starts.hear(Sign("decode-1", 1, Stage.WEIGHTS, 1, 9), 2e6)
    assert starts.still(2e6 + QUIET_S) is not None


def test_only_the_newest_life_of_a_part_counts() -> None:
    starts = started("decode-0")
    starts.end("decode-0")
    starts.begin("decode-0", 2, 50.0)
    starts.hear(Sign("decode-0", 2, Stage.LIBRARIES), 51.0)
    starts.hear(Sign("decode-0", 1, Stage.RUNS), 52.0)  # it was on its way
    assert starts.slowest == Sign("decode-0", 2, Stage.LIBRARIES)
    assert starts.still(170.0) is None
    assert starts.still(171.0) is not None


def test_the_slowest_part_has_most_before_it() -> None:
    starts = started("decode-0", "prefill-0", "pool-0")
    starts.hear(Sign("pool-0", 1, Stage.RUNS), 1.0)
    starts.hear(Sign("decode-0", 1, Stage.WEIGHTS, 5, 16), 2.0)
    starts.hear(Sign("prefill-0", 1, Stage.WEIGHTS, 4, 16), 2.0)
    assert starts.slowest is not None
    assert starts.slowest.part == "prefill-0"
    starts.hear(Sign("prefill-0", 1, Stage.STEPS, 1, 16), 3.0)
    assert starts.slowest.part == "decode-0"
    starts.hear(Sign("decode-0", 1, Stage.RANKS), 4.0)
    assert starts.slowest.part == "prefill-0", "one that waits is shown last"
    for part in ("decode-0", "prefill-0"):
        starts.hear(Sign(part, 1, Stage.RUNS), 5.0)
    assert starts.slowest is None


PARTS = ("decode-0", "decode-1", "prefill-0")


@given(gaps=st.lists(st.tuples(st.sampled_from(PARTS), st.floats(0.01, QUIET_S / 3 - EACH_S)), max_size=60))
def test_a_part_is_ended_if_and_only_if_it_is_quiet_for_too_long(gaps: list[tuple[str, float]]) -> None:
    """Parts move in any order; whoever is quiet for the limit is found at the next look, and nobody else."""
    starts, now = started(*PARTS), 0.0
    moved, done = dict.fromkeys(PARTS, 0.0), 0
    for part, gap in gaps:
        now, done = now + gap, done + 1
        quiet = {name for name, at in moved.items() if now - at >= QUIET_S}
        still = starts.still(now)
        assert (still is None) == (not quiet)
        if still is not None:
            assert still.sign is not None
            assert still.sign.part in quiet
            assert still.for_s == now - min(moved.values())
            return
        starts.hear(Sign(part, 1, Stage.WEIGHTS, done, 100), now)
        moved[part] = now


# --- Parts that run and are silent

STILL_S, LOOK_S = 30.0, 2.0


def running(*parts: str, still_s: float = STILL_S) -> Starts:
    starts = Starts(QUIET_S, 0.0, still_s)
    for part in parts:
        starts.begin(part, 1, 0.0)
        starts.hear(Sign(part, 1, Stage.RUNS), 0.0)
    return starts


def silent_at(starts: Starts, said: Sequence[Sign], until: float, since: float = 0.0) -> float | None:
    """Return when a part had been silent for too long, if one had."""
    now = since
    while now < until:
        now += LOOK_S
        for sign in said:
            starts.hear(sign, now)
        if starts.silent(now) is not None:
            return now
    return None


def test_a_part_that_runs_and_is_silent_is_found_and_one_that_is_heard_is_not() -> None:
    heard = [Sign("gateway-0", 1, Stage.RUNS)]
    found = silent_at(running("gateway-0", "router"), heard, 10 * STILL_S)
    assert found == pytest.approx(SILENT * STILL_S, abs=LOOK_S)
    assert silent_at(running("gateway-0"), heard, 100 * STILL_S) is None


def test_signs_of_an_earlier_life_are_none_and_a_part_that_starts_again_is_not_silent() -> None:
    starts = running("router")
    starts.begin("router", 2, 0.0)
    assert silent_at(starts, [], 10 * STILL_S) is None
    starts.hear(Sign("router", 2, Stage.RUNS), 0.0)
    assert silent_at(starts, [Sign("router", 1, Stage.RUNS)], 20 * STILL_S, since=10 * STILL_S) is not None


def test_a_launcher_that_stood_still_itself_takes_nobody_for_silent() -> None:
    for starts in (running("router"), running("router", still_s=1.0)):
        for now in range(0, 5_000, 1_000):
            starts.hear(Sign("router", 1, Stage.RUNS), float(now))
            assert starts.silent(float(now)) is None


def test_a_part_that_could_not_be_ended_is_found_again() -> None:
    starts = running("router")
    found = silent_at(starts, [], 10 * STILL_S)
    assert found is not None
    assert silent_at(starts, [], 20 * STILL_S, since=found) == pytest.approx(2 * found, abs=LOOK_S)
