"""The pool as a worker knows it: the member, the pages kept there for requests, and what the worker writes there.

A page that the worker may write to goes this way:

    ask ──▶ at hand ──▶ in a copy ──▶ handed on to the pool (Commit, Keep)
               ▲  │         ▲  └── not wanted any more: at hand again
               │  └─ part ──┘      (full pages of a prompt that still runs, written ahead)
               └──────┘ forgotten

A worker keeps some pages at hand (spare ones), which the pool takes back as soon as another worker waits for pages.
Only a worker that has to hand on all its requests waits: it asks firmly for what the first request needs.

What a copy reads, nothing else writes until the copy has ended; otherwise the copy does not count:

    between steps   steps and copies run one after the other: the blocks are free at once, and written to after the copy
    beside steps    blocks are kept until all parts are written; of a request that leaves at once parts are forgotten
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from alignedserve.core import units_for
from alignedserve.protocol.commands import Command, CopyOut, Send
from alignedserve.protocol.events import MemberJoined, MemberLost
from alignedserve.protocol.messages import AskPages, Attempt, LeasePages, Member, Message, Release, Spoiled
from alignedserve.protocol.page_names import more_hashes
from alignedserve.worker.step.blocks import blocks_in_place
from alignedserve.worker.step.device_pages import findable_tokens
from alignedserve.worker.step.request import WorkerRequest


class Lease:
    """The pages that a worker may write to, and its asks for pages.

    Each ask says which pages the worker has, so an ask puts right what a lost frame has left behind. Only the answer to
    the last ask counts. For example, a worker with 3 pages that needs 5 asks for 2 more.
    """

    def __init__(self) -> None:
        self.pages: list[int] = []  # at hand
        self._asks = 0
        self._asked: int | None = None  # pages of the unanswered ask; -1: an ask is to be sent in any case
        self._is_firm = False  # the unanswered ask
        # Since the last ask, pages came back from a copy in vain, or were handed on: only an ask surely frees them, for
        # a frame that hands pages on may be lost.
        self._handed_on = False
        self._had = 0  # spare pages that were wanted at the last answer, which brought all there were

    @property
    def is_awaited(self) -> bool:
        """Return whether to ask the pool again if no answer comes."""
        return self._asked is not None or self._handed_on

    def take_answer(self, lease: LeasePages) -> None:
        """Take the pages of an answer, unless a later ask was sent, with which these pages went back."""
        if lease.number != self._asks:
            return
        self.pages += lease.pages
        # Pages that were asked for firmly and not used are to become spare ones, which the pool can have back.
        self._had, self._asked = max(self._asked or 0, 0), -1 if self._is_firm else None
        self._is_firm = False

    def take(self, count: int) -> tuple[int, ...]:
        """Take `count` of the pages at hand, which must be enough."""
        self._had = 0
        return tuple(self.pages.pop() for _ in range(count))

    def ask_firmly(self, wanted: int, in_copies: Sequence[int]) -> AskPages | None:
        """Return an ask for pages without which a request cannot go on; the pool answers once it has all these pages.

        The pages at hand go back: a worker that keeps some pages and waits for more blocks others.
        """
        if self._is_firm and self._asked is not None and self._asked >= wanted:
            return None
        self.pages.clear()
        self._is_firm = True
        return self._ask(wanted, wanted, in_copies)

    def ask_for_spare(self, wanted: int, in_copies: Sequence[int]) -> AskPages | None:
        """Return an ask to have `wanted` pages at hand; None while the pool's last answer is enough.

        The answer is enough until some of its pages are used, or more are wanted."""
        if not self._is_firm and (self._had if self._asked is None else self._asked) >= wanted:
            return None
        is_repeated = self._asked == -1 or self._is_firm  # or the firm ask is wanted no more
        self._is_firm = False
        if is_repeated:  # an ask for none says that none are at hand
            self.pages.clear()
        more = max(0, wanted - len(self.pages))
        return self._ask(wanted, more, in_copies, is_spare=True) if more or is_repeated else None

    def give_back(self, in_copies: Sequence[int]) -> AskPages:
        """Return an ask that gives all spare pages at hand back; a firm ask that is not answered stays."""
        self.pages.clear()
        self._had = 0
        wanted = max(self._asked or 0, 0) if self._is_firm else 0
        return self._ask(wanted, wanted, in_copies, is_spare=not self._is_firm)

    def note_handed_on(self) -> None:
        """Note that pages were handed on to the pool, or were not."""
        self._handed_on = True

    def ask_again(self) -> None:
        """Let the next ask repeat all that is needed, and all that is given back."""
        if self.is_awaited:
            self._asked = -1

    def lose(self) -> None:
        """Forget the pages of a pool that is lost. The next ask, to this pool or another, says what is leased."""
        self.pages.clear()
        self._had = 0
        self._asked, self._handed_on = (-1 if self._asks else None), False

    def _ask(self, wanted: int, more: int, in_copies: Sequence[int], is_spare: bool = False) -> AskPages:
        self._handed_on = False
        self._asks += 1
        self._asked = wanted
        return AskPages(more, self._asks, (*in_copies, *self.pages), is_spare)


class PageNames:
    """Names a page or a block by a hash of all tokens up to its end. A worker hashes each page and block once."""

    def __init__(self, page_size: int, block_size: int, root: bytes) -> None:
        """`root` names the model and the layout of its KV."""
        self._page_size, self._block_size, self._root = page_size, block_size, root

    def pages_of(self, running: WorkerRequest, tokens: int) -> tuple[int, ...]:
        """Return the names of the full pages of a request's first `tokens`: each page is hashed once on a worker.

        A request without its beginning has no names for the rest: a name stands for all tokens before, too.
        """
        if running.num_lost:
            return ()
        names = running.named(self._named(running, running.names, tokens, self._page_size))
        return names[: tokens // self._page_size]

    def blocks_of(self, running: WorkerRequest, tokens: int) -> tuple[int, ...]:
        """Return the names of the full blocks of a request's first `tokens`, by which a device shares blocks."""
        running.block_names = self._named(running, running.block_names, tokens, self._block_size)
        return running.block_names[: tokens // self._block_size]

    def _named(self, running: WorkerRequest, known: tuple[int, ...], tokens: int, size: int) -> tuple[int, ...]:
        full = tokens // size
        if len(known) >= full:
            return known
        more = running.tokens(len(known) * size, full * size)
        root = b"" if known else self._root + running.request.kv_salt
        return more_hashes(known, more, size, root)

    def pages_before_last(self, running: WorkerRequest) -> tuple[int, ...]:
        """Return the names of the full pages that others may have computed for a request."""
        return self.pages_of(running, findable_tokens(running))


@dataclass
class Copy:
    """A copy of a request to pages of the pool. The pages stay taken until the copy has ended, wanted or not."""

    running: WorkerRequest
    known: tuple[int, ...]  # pages of the pool that come before
    pages: tuple[int, ...]
    pool: str  # holder of the pool
    wanted: bool = True
    has_ended: bool = False  # the request had ended when the copy began: only full pages are written
    stays: bool = False  # the request stays here, and is to be found by these full pages
    tokens: int = 0  # that are copied between two steps

    @property
    def has_left(self) -> bool:
        """Return whether the request is nowhere else on the worker."""
        return not (self.has_ended or self.stays)


class PageWriter:
    """The leases of a worker, and its copies to the leased pages."""

    def __init__(self, page_size: int, block_size: int, root: bytes = b"") -> None:
        """`root` names the model and the layout of its KV."""
        self._page_size, self._block_size = page_size, block_size
        self.names, self.lease = PageNames(page_size, block_size, root), Lease()
        self._copies: dict[int, Copy] = {}
        self._parts: dict[int, Copy] = {}  # under way
        self._written: dict[WorkerRequest, Copy] = {}  # all parts of a request, also parts under way
        self._copies_before: dict[int, str] = {}  # still under way, to a lost pool: number -> holder of the pool
        self._copy_number = 0

    @property
    def leased(self) -> tuple[int, ...]:
        return (*self.lease.pages, *self.in_copies)

    @property
    def copies(self) -> list[Copy]:
        return list(self._copies.values())

    @property
    def num_between_steps(self) -> int:
        """Return how many tokens are still to be copied before the next step begins."""
        return sum(copy.tokens for copy in self._copies.values())

    def target(self, pool: Member | None) -> Member | None:
        """Return the pool, if the worker may write there now.

        It may not while copies run that began before the pool was lost and came back: the pool may have leased the
        pages of these copies to others."""
        return None if pool is None or pool.holder in self._copies_before.values() else pool

    def pages_for(self, running: WorkerRequest, tokens: int) -> int:
        """Return how many pages of the first tokens are to be written: neither the pool nor a part has these pages.

        Nothing is written of a prompt that asks for a vector."""
        if not running.has_tokens:
            return 0
        num_held = units_for(tokens - running.num_lost, self._page_size)
        return num_held - len(running.known) - self.num_written(running)

    # --- Copies

    def begin(
        self,
        running: WorkerRequest,
        pool: Member,
        tokens: int,
        has_ended: bool = False,
        stays: bool = False,
        aside: bool = False,
    ) -> CopyOut:
        """Begin to copy the first tokens to pages at hand, which must be enough; the pool and parts have the others. A
        part is copied beside the steps (`aside`), all else between two steps."""
        start = (len(running.known) + self.num_written(running)) * self._page_size
        pages, copied = self.lease.take(self.pages_for(running, tokens)), running.tokens(running.num_lost, tokens)
        self._copy_number += 1
        copy = Copy(running, running.known, pages, pool.holder, has_ended=has_ended, stays=stays)
        before = self._written[running].pages if running in self._written else ()
        whole = replace(copy, pages=before + pages)
        if aside:
            self._parts[self._copy_number], self._written[running] = copy, whole
        else:
            self._written.pop(running, None)
            whole.tokens = max(0, len(copied) - start)
            self._copies[self._copy_number] = whole
        blocks = blocks_in_place(running.kv, self._block_size)
        return CopyOut(self._copy_number, pool.holder, blocks, pages, copied, start, aside=aside)

    def end_copy(self, number: int) -> Copy | None:
        """Return the copy that has ended; None where the pool was lost, or where the copy was only a part."""
        self._copies_before.pop(number, None)
        part = self._parts.pop(number, None)
        if part is not None and not part.wanted:
            self.take_back(part)
        return self._copies.pop(number, None)

    # --- Parts

    @property
    def written(self) -> dict[WorkerRequest, int]:
        """Return how many pages of each request are in parts."""
        return {running: len(parts.pages) for running, parts in self._written.items()}

    def num_written(self, running: WorkerRequest) -> int:
        return len(self._written[running].pages) if running in self._written else 0

    @property
    def being_written(self) -> set[WorkerRequest]:
        """Return the requests with a wanted part under way: the blocks of any other may be overwritten."""
        return {part.running for part in self._parts.values() if part.wanted}

    def is_writing(self, running: WorkerRequest) -> bool:
        """Return whether a part of the request is under way: the next part waits for that."""
        return running in self.being_written

    def take_parts(self, running: WorkerRequest) -> Copy:
        """Return all parts of a request, which are written, as a single copy."""
        assert not self.is_writing(running), "a part is under way"
        return self._written.pop(running)

    def forget_parts(self, running: WorkerRequest) -> None:
        """Take the pages of all parts of a request back; the pages of a part under way when that part has ended."""
        written = self._written.pop(running, None)
        if written is None:
            return
        under_way = [part for part in self._parts.values() if part.running is running and part.wanted]
        busy = {page for part in under_way for page in part.pages}
        for part in under_way:
            part.wanted = False
        self.take_back(replace(written, pages=tuple(page for page in written.pages if page not in busy)))

    def take_back(self, copy: Copy) -> None:
        """Count the pages of a copy as at hand again. The pool takes them for used until an ask says otherwise."""
        self.lease.pages += copy.pages
        if copy.pages:
            self.lease.note_handed_on()

    def drop(self, request: str, attempt: int) -> None:
        """Note that copies of the request up to this attempt are not wanted any more, unless the request had ended."""
        for copy in self._copies.values():
            name, number = copy.running.key
            if name == request and number <= attempt and not copy.has_ended:
                copy.wanted = False

    def lose_pool(self) -> list[WorkerRequest]:
        """Forget the pages of a lost pool, and return the requests that were being copied there and are still wanted.

        The pool may come back in the same life, with these pages still leased to this worker. After an ask the pool
        would lease them to others, so no ask is sent before the copies to these pages have ended.
        """
        self.lease.lose()
        self._copies_before |= {number: copy.pool for number, copy in (*self._copies.items(), *self._parts.items())}
        self._parts.clear()
        self._written.clear()
        again = [copy.running for copy in self._copies.values() if copy.wanted and copy.has_left]
        self._copies = {number: replace(copy, pages=()) for number, copy in self._copies.items() if not copy.wanted}
        return again

    @property
    def in_copies(self) -> tuple[int, ...]:
        """Return the leased pages that are in copies."""
        unwanted = [part for part in self._parts.values() if not part.wanted]
        copies = (*self._copies.values(), *self._written.values(), *unwanted)
        return tuple([page for copy in copies for page in copy.pages])


class PoolLink:
    """The pool that this worker copies from and to. This part hears of a lost pool after all other parts."""

    def __init__(self, writer: PageWriter) -> None:
        self.member: Member | None = None
        self.writer, self.holds = writer, PoolHolds(self)

    def joined(self, event: MemberJoined, now: float) -> None:
        self.member = event.member

    def lost(self, event: MemberLost, now: float) -> None:
        self.member = None

    def send(self, message: Message) -> list[Command]:
        """Send the message to the pool; return no command where there is no pool."""
        return [] if self.member is None else [Send(self.member.name, message)]

    def tell_spoiled(self, pages: tuple[int, ...]) -> list[Command]:
        """Tell the pool that these pages do not hold what their names say, or may not."""
        return self.send(Spoiled(pages)) if pages else []


CROSSING_S = 2.0  # for a message of the pool and a Commit that cross each other


class PoolHolds:
    """The requests for which the pool keeps pages until this worker releases them."""

    def __init__(self, pool: PoolLink) -> None:
        self._pool = pool
        self._attempts: dict[str, Attempt] = {}  # request -> attempt
        self._committed: dict[Attempt, float] = {}  # lately, and when

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, attempt: Attempt) -> bool:
        return self._attempts.get(attempt[0]) == attempt

    @property
    def attempts(self) -> set[Attempt]:
        return set(self._attempts.values())

    def add(self, attempt: Attempt) -> None:
        self._attempts[attempt[0]] = attempt

    def discard(self, attempt: Attempt) -> None:
        """Forget the pages of this attempt: the pool has a newer entry for the attempt."""
        if attempt in self:
            del self._attempts[attempt[0]]

    def committed(self, attempt: Attempt, now: float) -> None:
        """Note that the pool gets the request itself, to hand out again."""
        self.discard(attempt)
        self._committed = {before: at for before, at in self._committed.items() if now - at < CROSSING_S}
        self._committed[attempt] = now

    def decline(self, attempt: Attempt, now: float) -> list[Command]:
        """Release pages that the pool says it holds for an attempt which is not here any more.

        Send no Release shortly after a Commit: the pool may have spoken before the Commit came, and have handed the
        request out again since. The Release would free pages that are read here. The pool soon says again what it still
        holds (REFRESH_S)."""
        has_crossed = now - self._committed.get(attempt, -inf) < CROSSING_S
        return [] if has_crossed else self._pool.send(Release(*attempt))

    def release(self, attempt: Attempt, to: str = "") -> list[Command]:
        """Tell the pool that this attempt's pages are not needed here; `to` is the worker that has the attempt now."""
        if self._pool.member is None or attempt not in self:
            return []
        del self._attempts[attempt[0]]
        return self._pool.send(Release(*attempt, to))

    def release_all(self, attempts: Iterable[Attempt]) -> list[Command]:
        return [command for attempt in attempts for command in self.release(attempt)]

    def clear(self) -> None:
        self._attempts.clear()
        self._committed.clear()
