"""The blocks of a device as the parts of a core share them, and whether waiting prompts may be seated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from alignedserve.core import WorkerLimits
from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import Attempt
from alignedserve.scheduling.policy import Policy, Room
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.pace import Pace
from alignedserve.worker.pool import PageWriter
from alignedserve.worker.step.blocks import Blocks, NamedBlocks, add_blocks, drop_beginning, lose_kv, take_blocks
from alignedserve.worker.step.device_pages import NOTHING_SHARED, DevicePages
from alignedserve.worker.step.request import WorkerRequest


def blocks_for(limits: WorkerLimits, pace: Pace) -> Blocks:
    """Return the blocks of a device that keeps what requests have computed for others, if the policy reuses it."""
    if not pace.policy.reuse:
        return Blocks(limits.num_blocks)
    size = limits.block_size

    def cost_s(is_in_pool: bool) -> float:
        return size * (pace.copy_token_s if is_in_pool else pace.prompt_token_s)

    return NamedBlocks(limits.num_blocks, 1, cost_s)


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
        """Return the share of the device's blocks that is free."""
        return self.blocks.num_free / self.limits.num_blocks

    def blocks_with(self, occupants: Iterable[WorkerRequest]) -> list[int]:
        """Return free blocks, taken ones, and those that a step may still write to: each block once, if all is well.

        A block that several requests read counts as taken by the first of them."""
        taken = [*self._steps.left, *(running.blocks for running in occupants)]
        blocks = [*self.blocks.free, *chain.from_iterable(taken)]
        if more_readers := self.blocks.more_readers:
            return list((Counter(blocks) - Counter(more_readers)).elements())
        return blocks

    def connect(self, writer: PageWriter, pace: Pace) -> None:
        """Let requests share full pages by the names that the pool has for them, and drop blocks that no layer
        reads."""
        limits = self.limits
        size, page_size = limits.block_size, limits.page_size
        self.pages = DevicePages(self.blocks, size, page_size, writer.names.blocks_of, pace.fetch_s, limits.unread)
        self.pace = pace
        self.dropping = Dropping(self, writer)

    def orders(self) -> Sequence[Command]:
        """Return what the device is to do before whatever is ordered next; once."""
        return ()

    def by_chunk(self, policy: Policy) -> bool:
        """Return whether prompts get their blocks for each chunk when it runs: where they give some back, they must."""
        return policy.room is Room.CHUNKS or self.limits.reach is not None

    def to_hold(self, running: WorkerRequest, tokens: int) -> int:
        """Return how many of its `tokens` a request gets memory for when it is seated as a whole."""
        dropped = running.kv.dropped
        begun = max(running.prefix + 1, running.fetched_to) - dropped
        return max(begun, self.limits.least_held(tokens - dropped))

    def spare(self, blocks: tuple[int, ...]) -> None:
        """Free blocks of a request that goes on, as `leave` does, but seat no crowded-out prompt for that.

        The request will soon need as many again: the prompt waits until one of the others has ended.
        """
        is_crowded = self.is_crowded
        self.leave(blocks)
        self.is_crowded = is_crowded

    def num_freed(self, leaving: Iterable[WorkerRequest]) -> int:
        """Return the least number of blocks that come free if all of these requests leave."""
        return sum([self.blocks.num_freed(running.blocks) for running in leaving])

    def reconsider(self) -> None:
        """Let the first waiting prompt try again to get a seat, because something has changed."""
        self.is_stuck = False

    def give(self, blocks: tuple[int, ...]) -> None:
        """Free blocks that no step writes to."""
        self.blocks.give(blocks)
        self.is_stuck = self.is_crowded = False

    def leave(self, blocks: tuple[int, ...]) -> None:
        """Free blocks when the steps in flight, which may still write there, have ended."""
        if not self._steps.leave(blocks):
            self.give(blocks)

    def release(self, running: WorkerRequest) -> None:
        """Free the blocks of a request that no step writes to."""
        self.give(take_blocks(running))

    def lose(self, running: WorkerRequest) -> None:
        """Free the blocks of a request that no step writes to; the request loses its KV, and is recomputed."""
        self.release(running)
        lose_kv(running)

    def take_for(self, running: WorkerRequest, count: int) -> bool:
        """Give a request `count` more blocks, and return whether that many were free."""
        blocks = self.blocks.take(count)
        if blocks is not None:
            add_blocks(running, blocks)
        return blocks is not None

    def note_replaced(self, running: WorkerRequest) -> None:
        """Note that the choice of a step has given the blocks of a request to others."""
        take_blocks(running)

    def drop(self, running: WorkerRequest, tokens: int, free: Callable[[tuple[int, ...]], None]) -> None:
        """Hand the blocks of the first tokens of a request to `free`: no layer reads them any more."""
        free(drop_beginning(running, tokens, self.limits.block_size))

    def release_after_step(self, running: WorkerRequest) -> None:
        """Free the blocks of a request when the steps in flight have ended."""
        self.leave(running.blocks)


class Dropping:
    """Frees KV that no layer reads any more, of requests that still run, where all layers have windows.

        tokens     0 ·············· dropped ─────────────────────── prefix
        KV         given back       in `blocks`, read by what comes   ▲ the next token: it reads the last `reach` tokens

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
        """Free blocks that a request no longer needs; it keeps all while its pages are being written."""
        if not self._writer.is_writing(running):
            self._drop(running, self._memory.spare)

    def drop_to_leave(self, running: WorkerRequest, free: Callable[[tuple[int, ...]], None]) -> None:
        """Free blocks that a request which leaves no longer needs, though its pages are being written.

        With all its blocks, the device might never have room for the request again."""
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
