"""The block pairs of a device as the parts of a core share them, and whether waiting prompts may be seated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain

from alignedserve.core import WorkerLimits
from alignedserve.protocol.messages import Attempt
from alignedserve.scheduling.policy import Policy, Room
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.pace import Pace
from alignedserve.worker.page_writer import PageWriter
from alignedserve.worker.step.blocks import Blocks, add_pairs, drop_beginning, lose_kv, take_pairs
from alignedserve.worker.step.device_pages import NOTHING_SHARED, DevicePages
from alignedserve.worker.step.named_blocks import NamedBlocks
from alignedserve.worker.step.request import WorkerRequest


def blocks_for(limits: WorkerLimits, pace: Pace) -> Blocks:
    """Return the pairs of a device that keeps what requests have computed for others, if the policy reuses it."""
    if not pace.policy.reuse:
        return Blocks(limits.num_pairs)
    size = limits.block_size

    def cost_s(is_in_pool: bool) -> float:
        return size * (pace.copy_token_s if is_in_pool else pace.prompt_token_s)

    return NamedBlocks(limits.num_pairs, 1, cost_s)


class DeviceMemory:
    pace: Pace
    dropping: Dropping

    def __init__(self, limits: WorkerLimits, steps: StepsInFlight, blocks: Blocks) -> None:
        self.limits = limits
        self.blocks = blocks
        self.pages = NOTHING_SHARED
        self.copies_beside = False  # whether copies from the pool go on beside steps
        self.is_stuck = False  # the first waiting prompt could not be seated, and nothing has changed since
        self.is_crowded = False  # a prompt had to leave for others: no prompt is seated before memory is free
        self.steps = self._steps = steps

    @property
    def num_free(self) -> int:
        return self.blocks.num_free

    @property
    def free_share(self) -> float:
        """Return the share of the device's pairs that is free."""
        return self.blocks.num_free / self.limits.num_pairs

    def pairs_with(self, occupants: Iterable[WorkerRequest]) -> list[int]:
        """Return free, taken and still written pairs: each pair of the device once, as long as all is well.

        A pair that several requests read counts as taken by the first of them."""
        taken = [*self._steps.left, *(running.pairs for running in occupants)]
        pairs = [*self.blocks.free, *chain.from_iterable(taken)]
        if more_readers := self.blocks.more_readers:
            return list((Counter(pairs) - Counter(more_readers)).elements())
        return pairs

    def connect(self, writer: PageWriter, pace: Pace) -> None:
        """Let requests share full pages by the names that the pool has for them, where the pairs allow it, and drop
        what is neither read nor being written."""
        limits = self.limits
        size, page_size = limits.block_size, limits.page_size
        self.pages = DevicePages(self.blocks, size, page_size, writer.names.blocks_of, pace.fetch_s, limits.unread)
        self.pace = pace
        self.dropping = Dropping(self, writer)

    def by_chunk(self, policy: Policy) -> bool:
        """Return whether prompts get their pairs for each chunk when it runs: where they give some back, they must."""
        return policy.room is Room.CHUNKS or self.limits.reach is not None

    def to_hold(self, running: WorkerRequest, tokens: int) -> int:
        """Return how many of its `tokens` a request gets memory for when it is seated as a whole."""
        dropped = running.kv.dropped
        begun = max(running.prefix + 1, running.fetched_to) - dropped
        return max(begun, self.limits.least_held(tokens - dropped))

    def spare(self, pairs: tuple[int, ...]) -> None:
        """Free pairs of a request that goes on, as `leave` does; whether prompts may be seated stays as it is.

        It will soon need as many again: a prompt that had to leave for others waits until one of them has ended.
        """
        is_crowded = self.is_crowded
        self.leave(pairs)
        self.is_crowded = is_crowded

    def num_freed(self, leaving: Iterable[WorkerRequest]) -> int:
        """Return how many pairs come free at least if all of these requests leave."""
        return sum([self.blocks.num_freed(running.pairs) for running in leaving])

    def reconsider(self) -> None:
        """Let the first waiting prompt try again to get a seat, because something has changed."""
        self.is_stuck = False

    def give(self, pairs: tuple[int, ...]) -> None:
        """Free pairs that no step writes to."""
        self.blocks.give(pairs)
        self.is_stuck = self.is_crowded = False

    def leave(self, pairs: tuple[int, ...]) -> None:
        """Free pairs when the steps in flight, which may still write there, have ended."""
        if not self._steps.leave(pairs):
            self.give(pairs)

    def release(self, running: WorkerRequest) -> None:
        """Free the pairs of a request that no step writes to."""
        self.give(take_pairs(running))

    def lose(self, running: WorkerRequest) -> None:
        """Free the pairs of a request that no step writes to; no KV of it is left, so it is computed again."""
        self.release(running)
        lose_kv(running)

    def take_for(self, running: WorkerRequest, count: int) -> bool:
        """Give a request `count` more pairs, and return whether that many were free."""
        pairs = self.blocks.take(count)
        if pairs is not None:
            add_pairs(running, pairs)
        return pairs is not None

    def note_replaced(self, running: WorkerRequest) -> None:
        """Note that the choice of a step has given the pairs of a request to others."""
        take_pairs(running)

    def drop(self, running: WorkerRequest, tokens: int, free: Callable[[tuple[int, ...]], None]) -> None:
        """Hand the pairs of the first tokens of a request to `free`: no layer reads them any more."""
        free(drop_beginning(running, tokens, self.limits.block_size))

    def release_after_step(self, running: WorkerRequest) -> None:
        """Free the pairs of a request when the steps in flight have ended."""
        self.leave(running.pairs)


class Dropping:
    """Frees KV that no layer reads any more, of requests that still run, where all layers have windows.

        tokens     0 ·············· dropped ─────────────────────── prefix
        KV         given back       in `pairs`, read by what comes   ▲ the next token: it reads the last `reach` tokens

    A request drops whole pages of the pool, so that what it has left may go there as it is. From then on it is not
    found by its beginning: the pool forgets what it kept of that for this request, and gets its last tokens without
    names.
    """

    def __init__(self, memory: DeviceMemory, writer: PageWriter) -> None:
        self._memory, self._writer = memory, writer
        self._unread = memory.limits.unread
        self._let_go: list[Attempt] = []
        self.is_on = memory.limits.reach is not None

    def drop(self, running: WorkerRequest) -> None:
        """Free what a request that has run needs no longer. While pages of it are being written, it keeps its pairs."""
        if not self._writer.is_writing(running):
            self._drop(running, self._memory.spare)

    def drop_to_leave(self, running: WorkerRequest, free: Callable[[tuple[int, ...]], None]) -> None:
        """Free what a request that leaves needs no longer, though pages of it are being written. With all that it had
        the device might never have room for it again."""
        self._drop(running, free)

    def _drop(self, running: WorkerRequest, free: Callable[[tuple[int, ...]], None]) -> None:
        unread = self._unread(running.prefix)
        if not unread or running.kv.form:
            return
        if unread > running.kv.dropped:
            self._writer.forget_parts(running)
            self._memory.drop(running, unread, free)
            running.names = ()
        if running.known:  # where it was seated on what the device has, it may lack its beginning already
            running.forget_known()
            self._let_go.append(running.key)

    def take_let_go(self) -> list[Attempt]:
        """Return the attempts for which the pool need not keep pages any more; once."""
        let_go, self._let_go = self._let_go, []
        return let_go
