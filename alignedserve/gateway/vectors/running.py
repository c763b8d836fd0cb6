"""Run the requests of a body that asks for vectors, and read the vector of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from alignedserve.core import FinishReason, Request
from alignedserve.gateway.openai.errors import no_vector
from alignedserve.owner.client import Delivered, OwnerClient

T = TypeVar("T")


async def read_vector(client: OwnerClient, request: Request, note: Callable[[Delivered], None]) -> bytes:
    """Run a request to its end and return its vector. `note` hears what was delivered, which has no tokens."""
    async with aclosing(client.open(request)) as deliveries:
        async for delivered in deliveries:
            if delivered.finish is None or delivered.finish is FinishReason.ERROR:
                raise no_vector()
            note(replace(delivered, tokens=()))
            return delivered.opening.vector
    raise RuntimeError("a request's deliveries ended without a finish")


async def all_of(work: Sequence[Awaitable[T]]) -> list[T]:
    """Return the results of all work; where some of it fails the rest is cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
