"""Has workers write the pages of waiting requests again, in another form: the interface of such forms to the pool."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from alignedserve.core import Entry
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import Event
from alignedserve.protocol.messages import AskBatch
from alignedserve.scheduling.dues import Promise
from alignedserve.scheduling.slo import Standing


class WaitsInPool(Protocol):
    """A request that waits in the pool."""

    @property
    def id(self) -> str: ...

    @property
    def entry(self) -> Entry: ...

    @property
    def promise(self) -> Promise: ...

    @property
    def since(self) -> float: ...

    def standing(self, ask: AskBatch, now: float) -> Standing: ...


class AllWaiting(Protocol):
    """All requests that wait in the pool."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[WaitsInPool]: ...

    def waiting(self, request: str) -> WaitsInPool | None: ...


class Rewriting:
    """Leaves all pages as they are: what the pool does without such a form (alignedserve/forms/page_rewriting.py)."""

    num_rewritten = 0  # pages, since the start
    num_refused = 0  # pages that a worker could not write

    @property
    def num_under_way(self) -> int:
        """Return how many pages workers write now."""
        return 0

    @property
    def working(self) -> Collection[str]:
        """Return the workers that write some."""
        return ()

    def hear(self, event: Event) -> None:
        """Hear of each event before the pool's pages and requests follow it."""

    def waits(self, request: str) -> None:
        """Note that the request waits in the pool: the pages may be written again."""

    def waits_no_longer(self, request: str) -> None: ...

    def orders(self, now: float) -> Iterable[Command]:
        """Return orders to workers that have time to write pages."""
        return ()

    def say_again(self, worker: str) -> Iterable[Command]:
        """Return the order that a worker may not have heard."""
        return ()
