"""The block pairs of a device, and how they come to requests and leave them: what is plain is written here alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from alignedserve.core import NO_KV, Entry, KvForm
from alignedserve.worker.step.request import WorkerRequest


class Blocks:
    """Free block pairs of a device: pairs that were given back last go first, then pairs that were never taken."""

    def __init__(self, num_pairs: int) -> None:
        self._num_pairs = num_pairs
        self._fresh = 0  # this pair and those after it were never taken: they need no list, and a device has many
        self._back: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._back) + self._num_pairs - self._fresh

    @property
    def free(self) -> tuple[int, ...]:
        return (*range(self._fresh, self._num_pairs), *self._back)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take `count` pairs, or return None where there are fewer."""
        if count > self.num_free:
            return None
        again = [self._back.pop() for _ in range(min(count, len(self._back)))]
        start = self._fresh
        self._fresh += count - len(again)
        return (*again, *range(start, self._fresh))

    def give(self, pairs: Sequence[int]) -> None:
        self._back.extend(pairs)

    def num_freed(self, pairs: Sequence[int]) -> int:
        """Return how many of these pairs of a request are free once it gives them back."""
        return len(pairs)

    @property
    def kept(self) -> Collection[int]:
        """Return the pairs that are never written to as long as somebody reads them, or may come to."""
        return ()

    @property
    def more_readers(self) -> Sequence[int]:
        """Return the pairs that several requests read, each as often as it has readers beside the first."""
        return ()


def add_pairs(running: WorkerRequest, pairs: tuple[int, ...]) -> None:
    """Give a request more pairs, for whatever form it is kept in."""
    running.kv = running.kv.with_pairs(pairs)


def take_pairs(running: WorkerRequest) -> tuple[int, ...]:
    """Take all pairs from a request, which may get others, and return them."""
    pairs = running.kv.pairs
    running.kv = running.kv._replace(pairs=())
    return pairs


def lose_kv(running: WorkerRequest) -> None:
    """Note that nothing is kept of a request, which has no pairs any more."""
    running.kv, running.prefix = NO_KV, 0


def resume(running: WorkerRequest, entry: Entry, page_size: int) -> None:
    """Take over what other workers have made of a request, which has no pairs here yet."""
    lack_beginning(running, entry.dropped)
    running.resume(entry, page_size)


def lack_beginning(running: WorkerRequest, dropped: int) -> None:
    """Note that a request without pairs has no KV of its first tokens anywhere, since no layer reads it."""
    running.kv = KvForm(dropped=dropped)


def drop_beginning(running: WorkerRequest, tokens: int, block_size: int) -> tuple[int, ...]:
    """Take the pairs of the first tokens from a request, which no layer reads any more, and return them."""
    count = (tokens - running.kv.dropped) // block_size
    lost = running.kv.pairs[:count]
    running.kv = running.kv._replace(pairs=running.kv.pairs[count:], dropped=tokens)
    return lost


def pairs_in_place(kv: KvForm, block_size: int) -> tuple[int, ...]:
    """Return the pair of each block of tokens, of a request that lacks none of its tokens.

    A folded pair stands in the places of all pairs that it was made of."""
    if not kv.folded:
        return kv.pairs
    count = (kv.folded - kv.dropped) // block_size
    each = kv.folded // (count * block_size)
    return tuple([pair for pair in kv.pairs[:count] for _ in range(each)]) + kv.pairs[count:]
