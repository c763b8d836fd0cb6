"""Tests of turns by weight: who is next, how many hold a turn, and that no turn is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.gateway.access.keys import Caller, Limits
from alignedserve.gateway.http.bodies import BodyTurns, FairTurns

ANN, BOB, CAT = (Caller(name, limits=Limits(weight=weight)) for name, weight in (("ann", 3), ("bob", 1), ("cat", 1)))


async def work(turns: FairTurns, caller: Caller, served: list[str], rounds: int = 1) -> None:
    async with turns.turn(caller):
        served.append(caller.id)
        for _ in range(rounds):
            await asyncio.sleep(0)


def test_callers_that_wait_are_served_by_their_weights() -> None:
    served = list[str]()

    async def run() -> None:
        turns = FairTurns(1)
        await asyncio.gather(*(work(turns, caller, served) for caller in (ANN, BOB) for _ in range(40)))

    asyncio.run(run())
    assert Counter(served[:40]) == {"ann": 30, "bob": 10}
    assert len(served) == 80


def test_bodies_cost_what_they_are_long() -> None:
    """A caller with bodies of 4 MiB has no more of the thread for long texts than one with bodies of 9 KiB."""
    served = list[str]()

    async def run() -> None:
        turns = BodyTurns()
        flood = [turns.do(BOB, 4 << 20, partial(served.append, "bob")) for _ in range(10)]
        await asyncio.gather(*flood, *(turns.do(CAT, 9 << 10, partial(served.append, "cat")) for _ in range(500)))

    asyncio.run(run())
    assert Counter(served[:411]) == {"bob": 1, "cat": 410}
    assert served[411] == "bob"
    assert Counter(served) == {"bob": 10, "cat": 500}


def test_who_comes_later_is_next_and_has_saved_up_nothing() -> None:
    served = list[str]()

    async def run() -> None:
        turns = FairTurns(1)
        flood = [asyncio.create_task(work(turns, BOB, served)) for _ in range(20)]
        while len(served) < 10:
            await asyncio.sleep(0)
        late = [asyncio.create_task(work(turns, CAT, served)) for _ in range(20)]
        await asyncio.gather(*flood, *late)

    asyncio.run(run())
    assert "cat" in served[10:13]
    assert Counter(served[10:30])["cat"] in (9, 10, 11)


def test_turns_that_nobody_waited_for_are_not_charged() -> None:
    served = list[str]()

    async def run() -> None:
        turns = FairTurns(1)
        first = asyncio.create_task(work(turns, CAT, served, rounds=5))
        await asyncio.sleep(0)
        left = [asyncio.create_task(work(turns, BOB, served)) for _ in range(1000)]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        both = [asyncio.create_task(work(turns, caller, served)) for caller in (BOB, CAT) for _ in range(10)]
        await asyncio.gather(first, *both)

    asyncio.run(run())
    assert served[1:].index("bob") < 3


def test_a_caller_holds_no_more_than_one_may() -> None:
    served = list[str]()

    async def run() -> None:
        turns = FairTurns(4, of_one=1)
        some = [asyncio.create_task(work(turns, caller, served, rounds=9)) for caller in (ANN, ANN, ANN, BOB, CAT)]
        for _ in range(3):
            await asyncio.sleep(0)
        assert sorted(served) == ["ann", "bob", "cat"]
        await asyncio.gather(*some)

    asyncio.run(run())


WORKS = st.lists(
    st.tuples(st.sampled_from([ANN, BOB, CAT]), st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=30
)


@given(WORKS, st.integers(1, 4), st.integers(1, 4))
def test_no_turn_is_lost_and_none_is_given_twice(
    works: list[tuple[Caller, int, int, bool]], most: int, of_one: int
) -> None:
    """Also where clients leave while they wait, or as they get their turn."""
    held, beyond = Counter[str](), list[str]()

    async def one(turns: FairTurns, caller: Caller, rounds: int) -> None:
        async with turns.turn(caller):
            held[caller.id] += 1
            if held.total() > most or held[caller.id] > of_one:
                beyond.append(caller.id)
            try:
                for _ in range(rounds):
                    await asyncio.sleep(0)
            finally:
                held[caller.id] -= 1

    async def run() -> None:
        turns, tasks = FairTurns(most, of_one), list[asyncio.Task[None]]()
        for caller, before, rounds, leaves in works:
            tasks.append(asyncio.create_task(one(turns, caller, rounds)))
            for _ in range(before):
                await asyncio.sleep(0)
            if leaves:
                tasks[before % len(tasks)].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        again = [asyncio.create_task(one(turns, CAT, 0)) for _ in range(most + 1)]
        await asyncio.wait_for(asyncio.gather(*again), 10)

    asyncio.run(run())
    assert not beyond
    assert not held.total()
