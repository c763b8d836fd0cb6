"""Tests of how arrivals of the owner's thread reach coroutines."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from itertools import pairwise

from alignedserve.owner.arrivals import ArrivalQueues

MANY = 1_000


def test_many_arrivals_do_not_hold_up_the_event_loop() -> None:
    """What others wait for, such as bytes of their connections, comes between them."""

    async def run() -> None:
        queues, seen, read = ArrivalQueues[int](), list[int](), set[str]()
        names = [f"request {number}" for number in range(MANY)]
        with ExitStack() as waiting:
            waited = {name: waiting.enter_context(queues.waiting_for(name)) for name in names}
            for name in names:
                queues.put(name, 1)
                queues.put(name, 2)
            while len(read) < MANY:
                await asyncio.sleep(0)
                read |= {name for name in names if len(waited[name])}
                seen.append(len(read))
            assert all([[await queue.get(), await queue.get()] == [1, 2] for queue in waited.values()])
        assert max(after - before for before, after in pairwise([0, *seen])) < MANY // 10

    asyncio.run(run())


def test_a_request_with_few_does_not_wait_for_all_that_others_have() -> None:
    async def run() -> None:
        queues = ArrivalQueues[int]()
        with queues.waiting_for("flood") as flood, queues.waiting_for("chat") as chat:
            for number in range(MANY):
                queues.put("flood", number)
            queues.put("chat", 1)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert await chat.get() == 1
            assert len(flood) == MANY
            assert queues.has("flood")

    asyncio.run(run())


def test_what_comes_in_between_wakes_the_loop_again() -> None:
    async def run() -> None:
        queues = ArrivalQueues[int]()
        with queues.waiting_for("ann") as ann, queues.waiting_for("bob") as bob:
            for number in range(MANY):
                queues.put("ann", number)
            assert await ann.get() == 0
            await asyncio.to_thread(queues.put, "bob", 1)
            queues.put("nobody", 1)  # whose coroutine has gone
            assert await bob.get() == 1
            assert [await ann.get() for _ in range(len(ann))] == list(range(1, MANY))

    asyncio.run(asyncio.wait_for(run(), 10))
