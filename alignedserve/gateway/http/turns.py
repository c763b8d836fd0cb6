"""Let callers take turns at what bodies cost before they are requests: parsing, tokenising, the trial of a grammar.

    body         of a caller at once      of all callers                    its texts are tokenised
    short        half of SHORT_AT_ONCE    SHORT_AT_ONCE                     one of a caller, by two threads
    long         1                        LONG_AT_ONCE, above 256 KiB one   by a thread of their own
    with a form  1 trial, 1 of a long body                                  by the threads that try forms

So a short chat stands behind no long text, and a caller with many bodies, long texts or slow grammars waits for itself.
A short body whose form is tried has given its turn back: a trial may take seconds, and those behind it wait for all.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from alignedserve.gateway.openai.parsing import LARGE_BYTES

LONG_BYTES = 8 << 10  # a body above this may hold a text that takes five milliseconds to tokenise, and more
SHORT_AT_ONCE, LONG_AT_ONCE = 32, 8  # bodies that may be parsed at once, since a parsed body takes 25 times its memory
_TOKENISERS = 2  # threads; the library releases Python's lock while it works
_FORMERS = 4  # threads, which wait for the process that tries grammars: chats without a form do not; long bodies have 1

T = TypeVar("T")


class _Own:
    """The turns of one caller."""

    def __init__(self) -> None:
        self.short, self.long = asyncio.Semaphore(SHORT_AT_ONCE // 2), asyncio.Semaphore(1)
        self.texts, self.forms = asyncio.Semaphore(1), asyncio.Semaphore(1)


class Turns:
    def __init__(self) -> None:
        self._short, self._long = asyncio.Semaphore(SHORT_AT_ONCE), asyncio.Semaphore(LONG_AT_ONCE)
        self._large = asyncio.Semaphore(1)
        self._own: defaultdict[str, _Own] = defaultdict(_Own)  # by caller: there are no more than keys
        self._tokenisers = ThreadPoolExecutor(_TOKENISERS, thread_name_prefix="tokenise")
        self._long_tokeniser = ThreadPoolExecutor(1, thread_name_prefix="tokenise-long")
        self._formers = ThreadPoolExecutor(_FORMERS, thread_name_prefix="form")
        self._long_former = ThreadPoolExecutor(1, thread_name_prefix="form-long")

    @asynccontextmanager
    async def turn(self, caller: str, num_bytes: int) -> AsyncIterator[AsyncExitStack]:
        """Hold a turn with a body of this length, from before it is parsed until it has become requests, or until what
        is given here is closed."""
        own, is_long = self._own[caller], num_bytes > LONG_BYTES
        turns = [own.long, self._long] if is_long else [own.short, self._short]
        async with AsyncExitStack() as held:
            for turn in [*turns, self._large] if num_bytes > LARGE_BYTES else turns:
                await held.enter_async_context(turn)
            yield held

    async def try_form(self, caller: str, num_bytes: int, work: Callable[[], T], turn: AsyncExitStack) -> T:
        """Do work that tries a form in a thread.

        A short body first gives its turn back. A long one keeps it, since few may be parsed at once; but of its caller
        there is no other, so it waits for none of its caller's trials."""
        loop = asyncio.get_running_loop()
        if num_bytes > LONG_BYTES:
            return await loop.run_in_executor(self._long_former, work)
        await turn.aclose()
        async with self._own[caller].forms:
            return await loop.run_in_executor(self._formers, work)

    async def do(self, caller: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Do work on the texts of a body of this length in a thread."""
        own, loop = self._own[caller], asyncio.get_running_loop()
        if num_bytes > LONG_BYTES:
            return await loop.run_in_executor(self._long_tokeniser, work)
        async with own.texts:
            return await loop.run_in_executor(self._tokenisers, work)
