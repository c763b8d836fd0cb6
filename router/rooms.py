"""Which decode worker has most room, by what they told last and what has been sent their way since."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.router.loads import Loads


class Rooms:
    def __init__(self, block_size: int) -> None:
        """`block_size`: tokens of a pair on their devices."""
        self._block_size = block_size
        self._free: dict[str, int] = {}  # decode worker -> pairs; fewer than none where many were sent there since
        self._fullest_last = Loads()

    def tell(self, worker: str, free_pairs: int) -> None:
        self._free[worker] = free_pairs
        self._fullest_last.put((-float(free_pairs), 0, worker))

    def forget(self, worker: str) -> None:
        self._free.pop(worker, None)
        self._fullest_last.remove(worker)

    def name_one(self, tokens: Sequence[int]) -> str:
        """For a prompt of these; nobody where nobody is there."""
        worker = self._fullest_last.least()
        if worker is None:
            return ""
        self.tell(worker, self._free[worker] - len(tokens) // self._block_size - 1)
        return worker
