"""Where the tokens of a step's requests lie on the device: made once per step, read by every layer's kernels."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from alignedserve.kernels.common.placing import Section, StepInputs, StepMemory

Kept = TypeVar("Kept")


# Blocks as arrays, by the id of their tuple: a request has the same tuple in all steps until it gets a block.
_arrays: dict[int, tuple[tuple[int, ...], array[int]]] = {}
_MOST_KEPT = 8  # for each request of a step


def _array_of(blocks: Sequence[int]) -> array[int]:
    if not isinstance(blocks, tuple):  # it may change
        return array("i", blocks)
    its, made = _arrays.get(id(blocks), (None, None))
    if its is not blocks or made is None:
        made = array("i", blocks)
        _arrays[id(blocks)] = blocks, made
    return made


class QuerySpan(NamedTuple):
    """The place of one request in a step: its queries are the last of its tokens."""

    queries: int  # tokens that run in this step
    tokens: int  # all tokens of the request that have KV, including this step's
    blocks: Sequence[int]  # blocks, in the order of the tokens; ~p is block p, filled from its right end
    dropped: int = 0  # tokens before these, whose KV was given up: they count for positions alone


class Spans:
    """Compressed rows: span i has the queries rows[i] .. rows[i + 1] of the step's tokens, and the blocks
    blocks[starts[i]] .. blocks[starts[i + 1]]. All are int32 on the CPU.

    They are kept as Python's arrays, which C++ reads in place (`table`); tensors are made on request. A block that is
    filled from its right end stands as ~block, so below 0; three places read that: `slots_of` here, in
    triton/pieces.py, and `Places` in csrc/spans.h.
    """

    def __init__(self, lies: Iterable[QuerySpan], block_size: int) -> None:
        self.block_size = block_size
        self._kept: dict[Hashable, Any] = {}
        rows, starts = [0], [0]
        tokens: list[int] = []
        blocks = array("i")
        self._dropped: list[int] = []
        for queries, length, all_blocks, dropped in lies:
            rows.append(rows[-1] + queries)
            tokens.append(length)
            self._dropped.append(dropped)
            blocks += _array_of(all_blocks)[: -(-length // block_size)]
            starts.append(len(blocks))
        self._rows, self._tokens, self._starts = (array("i", values) for values in (rows, tokens, starts))
        self._blocks = blocks
        if len(_arrays) > _MOST_KEPT * (len(tokens) + _MOST_KEPT):
            _arrays.clear()

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def num_rows(self) -> int:
        return self._rows[-1]

    @property
    def only_decodes(self) -> bool:
        """Return whether each request has one new token."""
        return self.num_rows == len(self)

    @cached_property
    def rows(self) -> Tensor:
        return _tensor(self._rows)

    @cached_property
    def tokens(self) -> Tensor:
        return _tensor(self._tokens)

    @cached_property
    def starts(self) -> Tensor:
        return _tensor(self._starts)

    @cached_property
    def blocks(self) -> Tensor:
        return _tensor(self._blocks)

    @cached_property
    def is_in_order(self) -> bool:
        """Return whether the tokens lie in the order of the slots of their blocks, as other libraries count on."""
        return min(self._blocks, default=0) >= 0

    @cached_property
    def table(self) -> int:
        """Return the address of these spans as C++ sees them (csrc/spans.h), valid as long as they live."""
        parts = (self._rows, self._tokens, self._starts, self._blocks)
        self._table = array("q", (len(self), self.block_size, *(part.buffer_info()[0] for part in parts)))
        return self._table.buffer_info()[0]

    @cached_property
    def positions(self) -> Tensor:
        """Return the position of each row's token in its request, int64."""
        if not any(self._dropped):
            return self._places
        dropped = torch.tensor(self._dropped, dtype=torch.int64)
        return self._places + dropped.repeat_interleave(torch.tensor([*self._queries()], dtype=torch.int64))

    @cached_property
    def _places(self) -> Tensor:
        """Return the place of each row's token among the tokens of its request that have KV, int64."""
        places: list[int] = []
        for queries, tokens in zip(self._queries(), self._tokens, strict=True):
            places += range(tokens - queries, tokens)
        return torch.tensor(places, dtype=torch.int64)

    @cached_property
    def new_slots(self) -> Tensor:
        """Return the K slot of each row's token."""
        queries = torch.tensor([*self._queries()], dtype=torch.long)
        places = self.starts[:-1].long().repeat_interleave(queries) + self._places // self.block_size
        return _slots(self.blocks[places].long(), self._places % self.block_size, self.block_size)

    def kept(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return what a kernel made of these spans for another layer of the step, or make it now."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: Kept = self._kept[key]
        return kept

    def slots(self, span: int) -> Tensor:
        """Return the K slots of all tokens of a span, in order. A token's V lies `block_size` slots after its K."""
        blocks = self.blocks[self._starts[span] : self._starts[span + 1]].long()
        return slots_of(blocks, self.block_size)[: self._tokens[span]]

    def _queries(self) -> Iterator[int]:
        return (end - start for start, end in pairwise(self._rows))


def slots_of(blocks: Tensor, block_size: int) -> Tensor:
    """Return the K slots of the places in these blocks, each block from the end that it is filled from."""
    return _slots(blocks[:, None], torch.arange(block_size), block_size).flatten()


def _slots(blocks: Tensor, offsets: Tensor, block_size: int) -> Tensor:
    within = torch.where(blocks < 0, block_size - 1 - offsets, offsets)
    return 2 * torch.where(blocks < 0, ~blocks, blocks) * block_size + within


def _tensor(values: array[int]) -> Tensor:
    """Return a tensor of the same memory."""
    return torch.frombuffer(values, dtype=torch.int32) if values else torch.empty(0, dtype=torch.int32)


class TextRows:
    """The rows of a step that are whole texts, whose KV is not kept: text i has bounds[i] .. bounds[i + 1]."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    @property
    def num_rows(self) -> int:
        return int(self.bounds[-1])


@runtime_checkable
class Refilled(Protocol):
    def refill(self) -> None:
        """Fill the table's section again, for the requests that are there now."""


OF_LIBRARY = "requests"  # what is kept for another library that attends in captured steps


class LongChunks(NamedTuple):
    """The chunks that another library may attend for in captured steps."""

    least: int  # tokens of the longest of their requests
    pages: int  # most blocks of a request

    def suit(self, chunks: Sequence[QuerySpan], rows: int) -> bool:
        """Return whether the library may attend for these chunks, in a step of `rows` rows.

        It shares its work out as if all rows were of chunks, and reads blocks that are filled from the left."""
        is_long = max((lie.tokens for lie in chunks), default=0) >= self.least
        has_half = 2 * sum(lie.queries for lie in chunks) >= rows
        return is_long and has_half and all(min(lie.blocks) >= 0 for lie in chunks)


class StepSize(NamedTuple):
    """What a captured step has room for."""

    rows: int  # tokens: always as many
    decodes: int  # most requests with one token each
    chunks: int = 0  # most requests with more tokens
    adapted: bool = False  # whether some have adapters
    long: LongChunks | None = None  # where another library attends for the chunks

    def holds(self, lies: Sequence[QuerySpan], num_padding: int = 0) -> bool:
        """Return whether a step of this size has room for these requests; the last ones are padding."""
        num_chunks = sum(lie.queries > 1 for lie in lies)
        has_room = len(lies) - num_chunks <= self.decodes and num_chunks <= self.chunks
        own = [lie for lie in lies[: len(lies) - num_padding] if lie.queries > 1]
        return has_room and (self.long is None or self.long.suit(own, self.rows))


class StaticSpans(Spans):
    """Spans for steps that are captured once and replayed: a fixed number of tokens, in fixed memory.

    A captured step reads what its sections hold when it is replayed. `place` puts another step's requests there: on
    the CPU for kernels that look there, and on the device for kernels that read tables of their own. A kernel makes
    such a table (`kept`) once, in a section, and provides how it is refilled.
    """

    def __init__(self, size: StepSize, lies: Sequence[QuerySpan], block_size: int, memory: StepMemory) -> None:
        """Begin with these requests. The memory may be that of others too: of all of them, one is placed and replayed
        at a time. A block that several requests read is there once for each of them."""
        super().__init__((), block_size)
        self.size, self.device, self._inputs = size, memory.device, StepInputs(memory)
        self._device_positions, self._device_slots = (self.section(size.rows, torch.long) for _ in range(2))
        self.place(lies)

    @property
    def only_decodes(self) -> bool:
        """Return whether no step of this size has a prompt: what is captured serves all of them."""
        return not self.size.chunks

    @property
    def are_read_by_library(self) -> bool:
        return OF_LIBRARY in self._kept

    def section(self, count: int, dtype: torch.dtype) -> Section:
        """Return a section for other numbers of the step, all of which must be filled before each `place`."""
        return self._inputs.section(count, dtype)

    def place(self, lies: Sequence[QuerySpan]) -> None:
        """Place these requests, which have as many tokens together as were captured, and send all sections."""
        spans, room = Spans(lies, self.block_size), self._inputs.memory.blocks.host
        if spans.num_rows != self.size.rows or not self.size.holds(lies):
            raise ValueError(f"{len(spans)} requests with {spans.num_rows} tokens do not fit {self.size}")
        if len(spans._blocks) > len(room):
            raise ValueError(f"{len(spans._blocks)} blocks do not fit {len(room)} places")
        for name in ("rows", "tokens", "starts", "blocks", "is_in_order", "table"):
            self.__dict__.pop(name, None)  # of the step before
        self._rows, self._tokens, self._starts, self._blocks = spans._rows, spans._tokens, spans._starts, spans._blocks
        self._device_positions.host.copy_(spans.positions)
        self._device_slots.host.copy_(spans.new_slots)
        room[: len(spans._blocks)] = spans.blocks
        for kept in self._kept.values():
            if isinstance(kept, Refilled):
                kept.refill()
        self.send()

    def send(self) -> None:
        """Send all sections and the blocks to the device."""
        self._inputs.send(len(self._blocks))

    @property
    def device_blocks(self) -> Tensor:
        """Return the blocks on the device."""
        return self._inputs.memory.blocks.device

    @property
    def positions(self) -> Tensor:
        """Return the positions on the device."""
        return self._device_positions.device

    @property
    def new_slots(self) -> Tensor:
        """Return the slots of the new tokens on the device."""
        return self._device_slots.device
