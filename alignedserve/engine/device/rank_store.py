"""What the ranks of a worker tell each other to make NCCL's communicator: torch takes it for a store.

Rank 0 sets NCCL's id, for which the others wait. Threads of torch ask whether a rank has failed, and set it. What a
rank sets, it tells all others; so each has all values, and asks nobody.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store

from alignedserve.engine.device.rank_link import SHORT, RankLink
from alignedserve.errors import RankLost

log = logging.getLogger("alignedserve.engine")

_LIMIT = timedelta(seconds=300)  # torch's own: ranks do not begin their first step at the same time


class RankStore(Store):
    def __init__(self, links: Mapping[int, RankLink]) -> None:
        """Keep the values of all ranks; each link is for this alone."""
        super().__init__()
        self._links, self._values, self._changed = links, dict[str, bytes](), threading.Condition()
        for rank, link in links.items():
            threading.Thread(target=self._listen, args=(rank, link), name=f"store-{rank}", daemon=True).start()

    def set(self, key: str, value: str | bytes) -> None:
        value = value.encode() if isinstance(value, str) else value
        with self._changed:
            self._note(key, value)
            for link in self._links.values():
                link.tell(key.encode() + b"\0" + value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return self._values.keys() >= {*keys}

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = _LIMIT if timeout is None else timeout
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), limit.total_seconds()):
                raise RankLost(f"no rank has set {keys} within {limit}")

    def clone(self) -> RankStore:
        return self

    def _note(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._changed.notify_all()

    def _listen(self, rank: int, link: RankLink) -> None:
        try:
            while True:
                key, _, value = link.hear(SHORT).partition(b"\0")
                with self._changed:
                    self._note(key.decode(), value)
        except RankLost as error:
            log.info("rank %d sets nothing any more: %s", rank, error)
