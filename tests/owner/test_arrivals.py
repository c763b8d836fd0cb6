"""Tests of how arrivals of the owner's thread reach coroutines."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from alignedserve.owner.arrivals import ArrivalQueues

MANY = 1_000


def test_many_arrivals_do_not_hold_up_the_event_loop() -> None:
    """What others wait for, such as bytes of their connections, comes between them."""

    async def read(queues: ArrivalQueues[int], taken: list[int]) -> None:
        with queues.waiting_for("many") as queue:
            while len(taken) < MANY:
                taken.append(await queue.get())

    async def run() -> None:
        queues, taken, seen = ArrivalQueues[int](), list[int](), list[int]()
        reading = asyncio.create_task(read(queues, taken))
        await asyncio.sleep(0)
        for number in range(MANY):
            queues.put("many", number)
        while len(taken) < MANY:
            seen.append(len(taken))
            await asyncio.sleep(0)
        await reading
        assert taken == list(range(MANY))
        assert max(after - before for before, after in pairwise(seen)) < MANY // 10

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
            assert [ann.get_nowait() for _ in range(ann.qsize())] == list(range(1, MANY))

    asyncio.run(asyncio.wait_for(run(), 10))
