"""Hidden vectors on the device, where who runs is decided already (Apt-Serve §4.3, under the packing of BROS).

    waits ── it pays, memory is short ──▶ hidden ── memory comes free ──▶ KV: made once, without a second prefill
      └──────────────── otherwise ───────────────────────────────────────▶ KV ── leaves ──▶ waits, or the pool

A hidden request takes whole pairs, the one half and then the other, so that no half of a pair is left that KV could
not take: at most its last block is empty. Whoever is chosen may begin as hidden if that pays (hybrid.py), if the step
has time for what it will take of later ones, and if a pair is left for each that is seated to grow into. What memory is
left then goes to those that are hidden: their K and V are made before the step, in the time that it would have taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from alignedserve.core import CacheKind, Chunk, Slo, half_blocks, units_for
from alignedserve.cost.model import CostModel
from alignedserve.decode_worker.hybrid import Wish, assign, pays_as_hidden
from alignedserve.decode_worker.packing import PackedSeating
from alignedserve.protocol.commands import ProjectKv
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import Late
from alignedserve.worker.step.limits import Selection
from alignedserve.worker.step.running import Blocks, Running

_LATE_WORTH = 1e-6  # of what has missed its deadline, where such are dropped to the end


@dataclass(slots=True)
class HybridSeating(PackedSeating):
    """Who waits may take its memory as hidden vectors."""

    hides: Callable[[Running, int], bool] = field(kw_only=True)  # whether it pays for so many tokens
    headroom: int = 0  # pairs that are left for those that are seated, where somebody is seated as hidden

    def in_pair(self, running: Running) -> int:
        return self.block_size * (2 if self._is_hidden(running) else 1)

    def take(self, running: Running, size: int) -> None:
        is_hidden = self._is_hidden(running)
        PackedSeating.take(self, running, size)
        if is_hidden and not running.blocks:
            running.blocks = half_blocks(running.pairs)

    def _is_hidden(self, running: Running) -> bool:
        if running.pairs:
            return bool(running.blocks)
        tokens = self.room_for(running)
        left = self.blocks.num_free - self.headroom
        fits = units_for(tokens, 2 * self.block_size) <= left
        return fits and self.hides(running, tokens) and self.has_time_to_project(tokens)


class HybridCache:
    """What is asked of it at one moment goes by what it was told of that moment."""

    def __init__(self, block_size: int, blocks: Blocks, policy: Policy) -> None:
        self._block_size, self._blocks, self._policy = block_size, blocks, policy
        self._now, self._token_s = 0.0, 0.0
        self.num_hidden = 0  # requests that were seated as hidden, and stayed so
        self.num_projected = 0  # that have become KV

    def begin(self, now: float, num_here: int, cost: CostModel) -> None:
        """A step is planned: what a token costs all who are here, where it is kept as hidden."""
        self._now, self._token_s = now, num_here * cost.hidden_token_s

    def pays(self, running: Running, tokens: int) -> bool:
        return pays_as_hidden(self._wish(running, tokens))

    def _wish(self, running: Running, tokens: int) -> Wish:
        kv = units_for(tokens, self._block_size)
        hidden = units_for(tokens, 2 * self._block_size) if self._policy.is_hybrid else kv
        return Wish(self._value(running), kv, hidden, self._token_s * tokens)

    def _wish_of_hidden(self, running: Running, tokens: int) -> Wish:
        """It has its memory."""
        has = len(running.pairs)
        kv, penalty = max(has, units_for(tokens, self._block_size)), self._token_s * tokens
        return Wish(self._value(running), kv, has, penalty, is_sure=True)

    def pending_s(self, running: Running) -> float:
        return max(0.0, self._now - running.said_at)

    def _value(self, running: Running) -> float:
        pending_s, promise = self.pending_s(running), running.promise
        if self._policy.late is Late.DROP_LAST and promise.is_late(self._now):
            return _LATE_WORTH * pending_s
        if promise.dues is not None:
            return pending_s * promise.dues.worth
        return min(pending_s, Slo().tbt_s) if self._policy.packs else pending_s

    # --- Who has memory at all

    def begin_as(
        self, waiting: Sequence[Running], tokens_of: Callable[[Running], int], headroom: int
    ) -> list[CacheKind | None]:
        """Of what is free, but for so many pairs."""
        wishes = [self._wish(one, tokens_of(one)) for one in waiting]
        return assign(wishes, max(0, self._blocks.num_free - headroom))

    def stay_as(self, decodes: Sequence[Running]) -> list[CacheKind | None]:
        """As what they are where each finds a place for its next token, else by what they are worth."""
        held = [CacheKind.HIDDEN if one.blocks else CacheKind.KV for one in decodes]
        wishes = [self._wish(one, one.num_tokens) for one in decodes]
        more = (wish.size(kind) - len(one.pairs) for one, wish, kind in zip(decodes, wishes, held, strict=True))
        if sum(max(0, pairs) for pairs in more) <= self._blocks.num_free:
            return [*held]
        return assign(wishes, self._blocks.num_free + sum(len(one.pairs) for one in decodes))

    def seat(self, running: Running, is_hidden: bool, tokens: int) -> None:
        """With memory for so many tokens, that is there."""
        pairs = self._blocks.take(units_for(tokens, self._block_size * (2 if is_hidden else 1)))
        assert pairs is not None, "memory was assigned that is not there"
        running.pairs, running.blocks = pairs, half_blocks(pairs) if is_hidden else ()
        self.num_hidden += is_hidden

    # --- Who becomes KV

    def upgraded(
        self,
        selection: Selection,
        seated: dict[str, Running],
        tokens_of: Callable[[Running], int],
        headroom: int,
        cost: CostModel,
    ) -> tuple[Selection, Sequence[ProjectKv]]:
        """The selection with those as KV for whom there is memory, and what is to be done for that before it."""
        chosen = [*selection.decodes, *(seated[chunk.request] for chunk in selection.chunks)]
        hidden = sorted((one for one in chosen if one.blocks), key=lambda one: one.request.arrival_at)
        self.num_hidden += sum(one.blocks != () for one in selection.seated)
        if not hidden:
            return selection, ()
        wishes = [self._wish_of_hidden(one, max(tokens_of(one), one.num_tokens)) for one in hidden]
        free = max(0, self._blocks.num_free - headroom)
        kinds = assign(wishes, free + sum(wish.hidden for wish in wishes))
        upgraded = [
            (one, wish.kv) for one, wish, kind in zip(hidden, wishes, kinds, strict=True) if kind is CacheKind.KV
        ]
        if not upgraded:
            return selection, ()
        commands = [command for one, pairs in upgraded if (command := self._upgrade(one, pairs)) is not None]
        self.num_hidden -= sum(one in selection.seated for one, _ in upgraded)
        self.num_projected += len(commands)
        return _as_kv(selection, [one for one, _ in upgraded], cost), commands

    def _upgrade(self, running: Running, num_pairs: int) -> ProjectKv | None:
        blocks = running.blocks
        more = self._blocks.take(max(0, num_pairs - len(running.pairs)))
        assert more is not None, "memory was assigned that is not there"
        running.pairs, running.blocks = running.pairs + more, ()
        if not running.prefix:
            return None
        return ProjectKv(running.request.id, blocks, running.pairs, running.prefix)


def _as_kv(selection: Selection, upgraded: Iterable[Running], cost: CostModel) -> Selection:
    by_name = {one.request.id: one for one in upgraded}
    chunks = tuple(_chunk_as_kv(chunk, by_name.get(chunk.request)) for chunk in selection.chunks)
    projected = sum(one.prefix for one in by_name.values())
    shape = selection.shape._replace(hidden=selection.shape.hidden - projected)
    return replace(selection, chunks=chunks, shape=shape, predicted_s=cost.seconds(shape))


def _chunk_as_kv(chunk: Chunk, running: Running | None) -> Chunk:
    if running is None:
        return chunk
    return replace(chunk, pairs=running.pairs, kind=CacheKind.KV, blocks=())
