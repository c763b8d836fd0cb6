"""The block pairs of a device as the parts of a core share them, and whether waiting prompts may be seated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from alignedserve.core import WorkerLimits
from alignedserve.scheduling.policy import Policy, Room
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.pace import Pace
from alignedserve.worker.step.device_pages import NOTHING_SHARED, DevicePages, NamePages
from alignedserve.worker.step.named_blocks import NamedBlocks
from alignedserve.worker.step.running import Blocks, Running


def blocks_for(limits: WorkerLimits, pace: Pace) -> Blocks:
    """Return the pairs of a device that keeps what requests have computed for others, if the policy reuses it."""
    if not pace.policy.reuse:
        return Blocks(limits.num_pairs)
    size = limits.block_size

    def cost_s(is_in_pool: bool) -> float:
        return size * (pace.copy_token_s if is_in_pool else pace.prompt_token_s)

    return NamedBlocks(limits.num_pairs, 1, cost_s)


class DeviceMemory:
    def __init__(self, limits: WorkerLimits, steps: StepsInFlight, blocks: Blocks) -> None:
        self.limits = limits
        self.blocks = blocks
        self.pages = NOTHING_SHARED
        self.is_stuck = False  # the first waiting prompt could not be seated, and nothing has changed since
        self.is_crowded = False  # a prompt had to leave for others: no prompt is seated before memory is free
        self._steps = steps

    @property
    def num_free(self) -> int:
        return self.blocks.num_free

    @property
    def free_share(self) -> float:
        """Return the share of the device's pairs that is free."""
        return self.blocks.num_free / self.limits.num_pairs

    def pairs_with(self, occupants: Iterable[Running]) -> list[int]:
        """Return free, taken and still written pairs: each pair of the device once, as long as all is well.

        A pair that several requests read counts as taken by the first of them."""
        taken = [*self._steps.left, *(running.pairs for running in occupants)]
        pairs = [*self.blocks.free, *chain.from_iterable(taken)]
        if more_readers := self.blocks.more_readers:
            return list((Counter(pairs) - Counter(more_readers)).elements())
        return pairs

    def share_pages(self, name: NamePages, pace: Pace) -> DevicePages:
        """Let requests share full pages that have these names, where the pairs allow it."""
        limits = self.limits
        size, page_size = limits.block_size, limits.page_size
        self.pages = DevicePages(self.blocks, size, page_size, name, pace.fetch_s, limits.unread)
        return self.pages

    def by_chunk(self, policy: Policy) -> bool:
        """Return whether prompts get their pairs for each chunk when it runs: where they give some back, they must."""
        return policy.room is Room.CHUNKS or self.limits.reach is not None

    def to_hold(self, running: Running, tokens: int) -> int:
        """Return how many of its `tokens` a request gets memory for when it is seated as a whole."""
        begun = max(running.prefix + 1, running.fetched_to) - running.dropped
        return max(begun, self.limits.least_held(tokens - running.dropped))

    def spare(self, pairs: tuple[int, ...]) -> None:
        """Free pairs of a request that goes on, as `leave` does; whether prompts may be seated stays as it is.

        It will soon need as many again: a prompt that had to leave for others waits until one of them has ended.
        """
        is_crowded = self.is_crowded
        self.leave(pairs)
        self.is_crowded = is_crowded

    def num_freed(self, leaving: Iterable[Running]) -> int:
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

    def release(self, running: Running) -> None:
        """Free the pairs of a request that no step writes to."""
        self.give(running.pairs)

    def release_after_step(self, running: Running) -> None:
        """Free the pairs of a request when the steps in flight have ended."""
        self.leave(running.pairs)
