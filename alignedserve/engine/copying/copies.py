"""Copies KV between the device cache and pages of the arena.

The cache is [layers, 2 * blocks, block_size, kv_dim]: K of block b in half 2b, V in half 2b + 1. A page of kind KV has
page_size tokens, a multiple of block_size, in the cache's dtype, as [layers, 2, page_size, kv_dim]:

    layer 0   K of token 0, 1, ... page_size - 1
              V of token 0, 1, ... page_size - 1
    layer 1   K ...

A request's tokens fill the blocks one by one, each block from the left end or, where written ~block, from the right
end; a page holds the tokens in order. In a request's last page only the first `length` tokens of each row count: the
rest is neither written, nor read, nor part of the checksum.

The checksum is the CRC-32 of what is in use, and 1 in place of 0, which says that there is none. A CPU sums up what it
copies while it copies it; a GPU's pages, and what is written to a page otherwise, are read once more.

A page of another kind (engine/forms/int8_pages.py) is written from a page of kind KV, and expanded on its way to the
device. A GPU does both itself: it receives the page as it is, first its scales, and expands its layers into the blocks;
to write one, it receives a page of kind KV, and sends back its levels. No step reads or writes what that needs: it goes
from page to page, never through blocks. The pool keeps the old page as it is, and leases the new one to this worker,
until it has the answer; by then no copy is under way.

To and from a GPU a page goes in pieces of some layers. A kernel packs a piece of the blocks into a buffer on the
device, or unpacks it, beside the copy of another piece in a second stream:

    out   stream of the thread   pack 1 | pack 2 | pack 3 |                   in   the same with `copy` before `unpack`
          stream of the link              copy 1          | copy 2  ...

From page to page it is `copy`, `pack` and `copy`, by two of the buffers. There are few buffers: what a step copies
itself, some kilobytes, waits behind all that is queued for the link. A turn ends when all its pages are copied: between
two turns nothing touches the arena, and the link stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from alignedserve.engine.device.devices import CPU, Mark, beside_steps, finish
from alignedserve.engine.forms.int8_pages import Amend, page_forms
from alignedserve.errors import ArenaError, PlanError
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.reference import bytes_of
from alignedserve.kernels.common.spans import slots_of
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.kvpool.arena.arena import Arena, Contents, Header
from alignedserve.protocol.extents import PageKind
from alignedserve.protocol.page_names import chained_hashes

_GPU_TURN_BYTES = 512 << 20  # ten milliseconds of a link: the pause after a turn, 0.3 to 0.5 ms, is small against that
_PIECE_BYTES = 8 << 20  # 0.15 ms of a link, in which the host orders the next piece
_ALIGNED = 16  # bytes: all that is kept in buffers can be read there
_BUFFERS = 3  # so half a millisecond is queued: a step on an H200 took 4.8 ms longer behind 128 MiB


def pages_at_once(device: torch.device, page_bytes: int) -> int:
    """Return how many pages a turn copies: one on a CPU, which copies by itself and gains nothing by more."""
    return 1 if device.type == "cpu" else max(1, _GPU_TURN_BYTES // page_bytes)


def goes_in_pieces(device: torch.device) -> bool:
    """Return whether pages go through buffers on the device: a CPU copies from and to them directly."""
    return device.type != "cpu"


class _Link:
    """The buffers on a device through which a copier's pieces go, and the stream in which they are copied.

    At the end of a turn all copies are done, also where ordering one has failed: the places that they were copied to
    may belong to other requests from then on.
    """

    def __init__(self, cache: Tensor, page_size: int, least_bytes: int) -> None:
        """Prepare buffers for some layers of a page in the cache's dtype, and for anything of `least_bytes`."""
        layers, _, _, kv_dim = cache.shape
        self._device, layer = cache.device, 2 * page_size * kv_dim * cache.dtype.itemsize
        self.layers = max(1, min(layers, _PIECE_BYTES // layer))  # of a piece
        self.num_bytes = -(-max(self.layers * layer, least_bytes) // _ALIGNED) * _ALIGNED  # of a buffer
        self._memory: Tensor | None = None
        self._marks: list[Mark | None] = [None] * _BUFFERS  # behind the newest use of each buffer
        self._num = 0  # of buffers taken so far
        self._stream = beside_steps(cache.device)

    def out(self, piece: Tensor, pack: Callable[[Tensor], None]) -> None:
        """Order a copy to this piece of a page of what `pack` writes to a buffer."""
        number, rows = self._free_buffer(piece)
        pack(rows)
        self._follow()
        with self._stream:
            _copy(piece, rows)
            self._marks[number] = Mark(self._device)

    def into(self, piece: Tensor, unpack: Callable[[Tensor], None]) -> None:
        """Order a copy of this piece of a page to a buffer, which `unpack` reads."""
        number, rows = self._free_buffer(piece)
        with self._stream:
            _copy(rows, piece)
        self._lead()
        unpack(rows)
        self._marks[number] = Mark(self._device)

    def through(self, piece: Tensor, out: Tensor, work: Callable[[Tensor, Tensor], None]) -> None:
        """Order a copy of this piece of a page to a buffer, and one to `out` of what `work` makes of it in another."""
        self.into(piece, lambda rows: self.out(out, partial(work, rows)))

    def _free_buffer(self, piece: Tensor) -> tuple[int, Tensor]:
        number, self._num = self._num % _BUFFERS, self._num + 1
        if (mark := self._marks[number]) is not None:
            mark.wait()
        if self._memory is None:
            self._memory = torch.empty((_BUFFERS, self.num_bytes), dtype=torch.uint8, device=self._device)
            self._follow()  # the thread's stream may have used that memory
        return number, self._memory[number, : piece.nbytes].view(piece.dtype).view(piece.shape)

    def _follow(self) -> None:
        """Put what is ordered in the link's stream from now on behind the thread's stream."""
        mark = Mark(self._device)
        with self._stream:
            mark.go_behind()

    def _lead(self) -> None:
        """Put what is ordered in the thread's stream from now on behind the link's stream."""
        with self._stream:
            mark = Mark(self._device)
        mark.go_behind()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._lead()
        finish(self._device)


def _copy(out: Tensor, x: Tensor) -> None:
    """Order a copy between the CPU and a device. Where K and V of a layer lie apart in the last page of a request, each
    is a copy of its own: torch would copy them through memory of the CPU, and wait."""
    whole = out.is_contiguous() and x.is_contiguous()
    for to, of in ((out, x),) if whole else zip(out.flatten(0, 1), x.flatten(0, 1), strict=True):
        to.copy_(of, non_blocking=True)


@dataclass(frozen=True)
class _PagePart:
    """The part of a request that one page holds."""

    page: int
    contents: Contents
    slots: Tensor  # of its K vectors
    first: int = 0  # the request's first token in the page


class PageCopier:
    """Copies between one device cache and one arena."""

    def __init__(self, cache: Tensor, arena: Arena, page_size: int, verify: bool) -> None:
        self._cache = cache
        self._layers, halves, self._block_size, self._kv_dim = cache.shape
        self._num_blocks = halves // 2
        self._kernels = choose(cache.device, cache.dtype).kernels
        self._arena = arena
        self._page_size = page_size
        self._verify, self._sums = verify, choose(CPU, cache.dtype).kernels if verify else self._kernels
        self._in_pieces = goes_in_pieces(cache.device)
        self._sums_while_copying = verify and not self._in_pieces
        page_bytes = 2 * self._layers * page_size * self._kv_dim * cache.dtype.itemsize
        shape = (2 * self._layers, page_size, self._kv_dim)
        self._forms = page_forms(*shape, cache.dtype, self._kernels, cache.device)
        self._at_once = pages_at_once(cache.device, page_bytes)
        self._link = _Link(cache, page_size, max(form.least_bytes for form in self._forms.values()))
        self._check_arena()

    def copy_out(
        self,
        blocks: Sequence[int],
        pages: Sequence[int],
        tokens: Sequence[int],
        start: int = 0,
        amend: Amend | None = None,
    ) -> None:
        """Copy the KV of a request's first `tokens`, from `start` on, to pages that are leased to this worker."""
        for _ in self.pages_out(blocks, pages, tokens, start, amend):
            pass

    def pages_out(
        self,
        blocks: Sequence[int],
        pages: Sequence[int],
        tokens: Sequence[int],
        start: int = 0,
        amend: Amend | None = None,
    ) -> Iterator[bool]:
        """Copy out one turn at a time, whenever the next turn is asked for: one page, or several pages of a GPU.

        `amend` writes to each page what the device does not hold.
        """
        for turn in self._turns(self._parts(blocks, pages, tokens, start)):
            for part in turn:
                self._arena.begin_write(part.page)
            with self._link:
                sums = [self._gather(part, self._arena.payload(part.page)) for part in turn]
            for part, checksum in zip(turn, sums, strict=True):
                self._end_write(part, checksum, amend)
            yield True  # nothing here holds memory of the arena: it may be closed before the next turn

    def _end_write(self, part: _PagePart, checksum: int | None, amend: Amend | None) -> None:
        payload = self._arena.payload(part.page)
        if amend is not None and self._is_amended(part, payload, amend):
            checksum = None
        self._arena.end_write(part.page, part.contents, checksum or self._checksum(part.contents, payload) or 0)

    def copy_in(self, pages: Sequence[int], blocks: Sequence[int], tokens: Sequence[int], start: int = 0) -> bool:
        """Copy the KV of a request's first `tokens`, from `start` on, to the blocks; False if a page does not hold its
        tokens' KV: then no block from there on may be used."""
        return all(self.pages_in(pages, blocks, tokens, start))

    def pages_in(
        self, pages: Sequence[int], blocks: Sequence[int], tokens: Sequence[int], start: int = 0
    ) -> Iterator[bool]:
        """Copy in one turn at a time, and yield whether all pages of the turn were intact."""
        return map(self._read, self._turns(self._parts(blocks, pages, tokens, start)))

    def num_turns(self, num_pages: int) -> int:
        """Return how many turns `pages_out` or `pages_in` takes for `num_pages` pages."""
        return -(-num_pages // self._at_once)

    def rewrite(self, page: int, into: int) -> bool:
        """Copy a full page of plain KV to the page `into`, in the form of that page, which this worker has leased.

        False if `page` is not what it should be, or the form cannot hold it: then `into` cannot be read.
        """
        contents = self._arena.contents(page)
        if contents is None or (contents.kind, contents.length) != (PageKind.KV, self._page_size):
            return False
        kind, done = self._arena.kind_of(into), list[bool]()
        self._arena.begin_write(into)

        def write(payload: memoryview) -> int | None:
            form, rows, to = self._forms[kind], self._rows(contents, payload).flatten(0, 1), self._arena.payload(into)
            scales = form.new_scales()
            with self._link:
                for piece, levels, quantise in form.packing(rows, to, scales, self._link.num_bytes):
                    if self._in_pieces:
                        self._link.through(piece, levels, quantise)
                    else:
                        quantise(piece, levels)
            done.append(form.write_scales(scales, to))
            return self._checksum(contents, payload)

        if not self._arena.read(page, contents, write) or not done[0]:
            return False
        written = Contents(kind, contents.length, contents.token_hash)
        self._arena.end_write(into, written, self._checksum(written, self._arena.payload(into)) or 0)
        return True

    def close(self) -> None:
        self._arena.close()

    def _turns(self, parts: Iterator[_PagePart]) -> Iterator[list[_PagePart]]:
        while turn := list(islice(parts, self._at_once)):
            yield turn

    def _read(self, turn: list[_PagePart]) -> bool:
        """Copy a turn's pages to the device, wait until the copies have left the pages, and check them again."""
        begun = list[tuple[_PagePart, Header, int | None]]()
        with self._link:
            for part in turn:
                before = self._arena.begin_read(part.page, part.contents)
                if before is None:
                    break
                begun.append((part, before, self._scatter(part, self._arena.payload(part.page))))
        return len(begun) == len(turn) and all(self._end_read(*one) for one in begun)

    def _end_read(self, part: _PagePart, before: Header, checksum: int | None) -> bool:
        checksum = checksum or self._checksum(part.contents, self._arena.payload(part.page))
        return self._arena.end_read(part.page, part.contents, before, checksum)

    def _gather(self, part: _PagePart, payload: memoryview) -> int | None:
        """Copy from the device to the page, and return the checksum if that took no other pass.

        From a GPU the copy may still be on its way when this returns.
        """
        rows = self._rows(part.contents, payload)
        if self._sums_while_copying:
            return _in_header(self._kernels.gather_and_sum(self._cache, part.slots, rows))
        if self._in_pieces:
            for cache, piece, slots in self._pieces(part, rows):
                self._link.out(piece, partial(self._kernels.gather, cache, slots))
        else:
            self._kernels.gather(self._cache, part.slots, rows)
        return None

    def _is_amended(self, part: _PagePart, payload: memoryview, amend: Amend) -> bool:
        return amend(self._rows(part.contents, payload), range(part.first, part.first + part.contents.length))

    def _scatter(self, part: _PagePart, payload: memoryview) -> int | None:
        """Copy from the page to the device, and return as `_gather` does."""
        if (form := self._forms.get(part.contents.kind)) is not None:
            slots = on_device(part.slots, self._cache.device)
            for piece, expand in form.pieces(payload, self._cache, slots, self._link.num_bytes):
                if self._in_pieces:
                    self._link.into(piece, expand)
                else:
                    expand(piece)
            return None
        rows = self._rows(part.contents, payload)
        if self._sums_while_copying:
            return _in_header(self._kernels.scatter_and_sum(self._cache, part.slots, rows))
        if self._in_pieces:
            for cache, piece, slots in self._pieces(part, rows):
                self._link.into(piece, partial(self._kernels.scatter, cache, slots))
        else:
            self._kernels.scatter(self._cache, part.slots, rows)
        return None

    def _pieces(self, part: _PagePart, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the layers of each piece: of the cache, of the page, and the slots on the device."""
        slots, at_once = on_device(part.slots, self._cache.device), self._link.layers
        for cache, piece in zip(self._cache.split(at_once), rows.split(at_once), strict=True):
            yield cache, piece, slots

    def _rows(self, contents: Contents, payload: memoryview) -> Tensor:
        """Return a view of the page's memory, [layers, 2, length, kv_dim]."""
        flat = torch.frombuffer(payload, dtype=self._cache.dtype)
        return flat.view(self._layers, 2, self._page_size, self._kv_dim)[:, :, : contents.length]

    def _checksum(self, contents: Contents, payload: memoryview) -> int | None:
        """Return the checksum of what is in use: the first tokens of each row, or all of a page that is always full."""
        if not self._verify:
            return None
        if contents.kind in self._forms:
            return _in_header(self._sums.crc32(torch.frombuffer(payload, dtype=torch.uint8)[None]))
        return _in_header(self._sums.crc32(bytes_of(self._rows(contents, payload))))

    def _parts(
        self, blocks: Sequence[int], pages: Sequence[int], tokens: Sequence[int], start: int
    ) -> Iterator[_PagePart]:
        """Yield the part of the request in each page."""
        kinds = [self._arena.kind_of(page) for page in pages]
        self._check(blocks, pages, tokens, start)
        places = slots_of(torch.tensor(blocks, dtype=torch.long), self._block_size)[: len(tokens)]
        first = start // self._page_size
        slots, hashes = places.split(self._page_size)[first:], chained_hashes(tokens, self._page_size)[first:]
        parts = zip(pages, kinds, slots, hashes, range(start, len(tokens), self._page_size), strict=False)
        for page, page_kind, page_slots, token_hash, first_token in parts:
            yield _PagePart(page, Contents(page_kind, len(page_slots), token_hash), page_slots, first_token)

    def _check(self, blocks: Sequence[int], pages: Sequence[int], tokens: Sequence[int], start: int) -> None:
        if start % self._page_size or start > len(tokens):
            raise PlanError(f"a copy of {len(tokens)} tokens cannot start at {start}: no page starts there")
        if len(tokens) > len(blocks) * self._block_size:
            raise PlanError(f"{len(blocks)} blocks are too few for the KV of {len(tokens)} tokens")
        if len(tokens) - start > len(pages) * self._page_size:
            raise PlanError(f"{len(pages)} pages are too few for the KV of {len(tokens) - start} tokens")
        if not all(-self._num_blocks <= block < self._num_blocks for block in blocks):
            raise PlanError(f"a copy names a block outside 0..{self._num_blocks - 1}")

    def _check_arena(self) -> None:
        if self._page_size % self._block_size:
            raise ArenaError(f"pages of {self._page_size} tokens do not hold whole blocks of {self._block_size}")
        token_bytes = self._layers * self._cache.dtype.itemsize
        kv_bytes = 2 * self._page_size * self._kv_dim * token_bytes
        for kind in self._arena.extents.kinds:
            needed = self._forms[kind].num_bytes if kind in self._forms else kv_bytes
            found = self._arena.page_bytes.payload(kind)
            if (self._arena.page_size, found) != (self._page_size, needed):
                raise ArenaError(
                    f"{self._arena.path} has pages of {self._arena.page_size} tokens in {found} bytes,"
                    f" this model needs {self._page_size} tokens in {needed}: restart the pool"
                )


def _in_header(crc: int) -> int:
    """Return the checksum as a page's header has it, where 0 says that there is none."""
    return crc or 1
