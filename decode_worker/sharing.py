"""Who runs and who joins where block pairs are shared (BROS §5, the memory ladder of batch-level scheduling).

Before a step, and between two:

    1. real-time requests that decode claim a slot more: free pairs, else what best-effort ones have
    2. best-effort ones that miss nothing claim theirs, of what is free
    3. the step is chosen among those that have all their slots; real-time prompts that join preempt as in 1
    4. whom that has cost a slot is left out of the step, and nobody in it loses one before it has ended
    5. who misses slots gets them back where there is room now, and runs in the next step

Nobody best-effort joins while one that is here lacks slots: it was here first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from alignedserve.core import Chunk, WorkerLimits
from alignedserve.cost.model import CostModel, Shape
from alignedserve.decode_worker.blocks import SharedBlocks, Side
from alignedserve.protocol.commands import CopySlots
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.step.limits import Selection
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seating import Seating


class Sharing:
    def __init__(self, limits: WorkerLimits, policy: Policy) -> None:
        num_slots = limits.num_pairs * limits.block_size
        self.blocks = SharedBlocks(limits.num_pairs, limits.block_size, policy.num_places(num_slots))
        self._short: set[Running] = set()  # they found no slot for their next token when they last asked

    def seat(self, running: Running, tokens: int) -> bool:
        return self.blocks.claim(running, side_of(running), tokens)

    def claims_next(self, running: Running) -> bool:
        """All its slots, and one for its next token; a prompt has claimed what it needs."""
        claimed = self.blocks.claim(running, side_of(running), running.prefix + 1)
        (self._short.discard if claimed else self._short.add)(running)
        return claimed

    def release(self, running: Running) -> None:
        self.blocks.release(running)
        self._short.discard(running)

    @property
    def is_plentiful(self) -> bool:
        """Nobody lacks anything."""
        return not self._short and not self.blocks.have_lost

    def whole(self, seated: Iterable[Running]) -> tuple[Running, ...]:
        """Who can run."""
        if self.is_plentiful:
            return tuple(seated)
        return tuple(one for one in seated if self.blocks.is_whole(one, one.prefix + 1))

    def lacking(self, seated: Iterable[Running]) -> list[Running]:
        """Who cannot, for want of slots that others have."""
        return [one for one in seated if one in self._short or self.blocks.has_lost(one)]

    def begin(self, kept: Iterable[Running]) -> None:
        """Another step is planned; these have ended, and lose nothing before their answers are copied."""
        self.blocks.unpin()
        self.blocks.pin(kept)

    def grow(self, seated: Iterable[Running], kept: Iterable[Running]) -> None:
        """A slot more for whoever misses none; those that join may take it again."""
        for running in seated:
            if not running.promise.is_rt and not self.blocks.has_lost(running):
                self.claims_next(running)
        self.begin(kept)

    def return_slots(self, lacking: Iterable[Running]) -> bool:
        """To these, as far as there is room; whether to anybody."""
        returned = [running for running in lacking if self.claims_next(running)]
        return bool(returned)

    def left_of(self, selection: Selection, seated: dict[str, Running], cost: CostModel) -> Selection:
        """Without those that have lost slots to others that were chosen after them; the rest lose none."""
        decodes, chunks = self.whole(selection.decodes), selection.chunks
        if not self.is_plentiful:
            chunks = tuple(chunk for chunk in chunks if self._can_run(chunk, seated[chunk.request]))
        self.blocks.pin(decodes)
        self.blocks.pin(seated[chunk.request] for chunk in chunks)
        if len(decodes) == len(selection.decodes) and len(chunks) == len(selection.chunks):
            return selection
        sizes = [(len(chunk.tokens), chunk.start) for chunk in chunks]
        shape = Shape.of(sizes, [one.prefix for one in decodes])
        return replace(selection, decodes=decodes, chunks=chunks, shape=shape, predicted_s=cost.seconds(shape))

    def _can_run(self, chunk: Chunk, running: Running) -> bool:
        return self.blocks.is_whole(running, chunk.start + len(chunk.tokens))

    def copies(self) -> Sequence[CopySlots]:
        """Before whatever is ordered next."""
        copies = self.blocks.copies()
        return () if copies is None else (copies,)


def side_of(running: Running) -> Side:
    return Side.LEFT if running.promise.is_rt else Side.RIGHT


@dataclass(slots=True)
class SharedSeating(Seating):
    """A real-time request has what is free, and what best-effort ones have that are in no step."""

    sharing: Sharing = field(kw_only=True)
    is_open: bool = False  # to real-time ones, however many are seated
    takes_any: bool = True  # whether best-effort ones may join

    def left_for(self, running: Running) -> int:
        blocks = self.sharing.blocks
        pairs = blocks.num_free + (blocks.room_for_rt if running.promise.is_rt else 0)
        return pairs * self.block_size

    def has_seat(self, waiting: Running) -> bool:
        return self.seats > 0 or (self.is_open and waiting.promise.is_rt)

    def may_seat(self, waiting: Running) -> bool:
        return self.takes_any or waiting.promise.is_rt

    @property
    def takes_best_effort(self) -> bool:
        return self.takes_any

    def most(self, running: Running, size: int) -> int:
        if running.pairs:
            return size
        fits = self.has_seat(running) and self.sharing.blocks.fits(side_of(running), self.room_for(running))
        return size if fits else 0

    def take(self, running: Running, size: int) -> None:
        if running.pairs:
            return
        seated = self.sharing.seat(running, self.room_for(running))
        assert seated, "a choice took more than there was"
        self.seats -= 1
        self.seated.append(running)
