"""The requests that occupy a decode worker: residents, prompts, and requests that join or have ended.

residents  decode, or are about to: all their tokens but the last have KV here
prompts    have pairs, and run chunk by chunk
fetching   have pairs, and the pages that hold their first tokens are being copied there; prompts after that
joining    have pairs, and the pages that hold their KV are being copied there
abandoned  were fetching or joining and are not wanted any more, but pages are still being copied to their pairs
received   have pairs, and their KV is on its way from a prefill worker (transfers.py)
departing  have pairs, and leave for a prefill worker, but may have to stay (departures.py)
kept       have ended, and have pairs until their KV is on its way to the pool

To pairs that pages or KV are copied to, nothing else is written until that has ended: their requests are in no step,
and keep them until then, wanted or not.
"""

from __future__ import annotations

from alignedserve.core import Chunk
from alignedserve.decode_worker.requests.departures import Departures
from alignedserve.decode_worker.requests.transfers import IncomingTransfers
from alignedserve.worker.step.running import Running


class Occupancy:
    def __init__(self) -> None:
        self.residents: dict[str, Running] = {}
        self.prompts: dict[str, Running] = {}
        self.joining: dict[int, Running] = {}  # number of the copy -> request
        self.fetching: dict[int, Running] = {}  # likewise
        self.abandoned: dict[int, Running] = {}  # likewise
        self.kept: list[Running] = []
        self.transfers = IncomingTransfers()
        self.departures = Departures()
        self._short_at = 0  # so many were seated when a request last went to the pool for lack of memory; 0: forgotten

    # --- Which requests there are

    def find(self, request: str) -> Running | None:
        """Return the request of this name that may be in a step."""
        return self.residents.get(request) or self.prompts.get(request)

    def running_of(self, chunk: Chunk) -> Running:
        """Return the request that this chunk of a step is of."""
        running = self.find(chunk.request)
        assert running is not None, "a chunk was chosen of a request that is not here"
        return running

    @property
    def seated(self) -> list[Running]:
        """Return the requests that may be in a step."""
        return [*self.residents.values(), *self.prompts.values()]

    @property
    def unfinished(self) -> list[Running]:
        """Return the prompts that have pairs and are not through."""
        return [*self.prompts.values(), *self.fetching.values()]

    @property
    def best_effort(self) -> list[Running]:
        """Return the best-effort requests that may be in a step, and so can leave."""
        return [running for running in self.seated if not running.promise.is_rt]

    @property
    def num_seated(self) -> int:
        """Return how many requests have a seat; a departing one may have to stay."""
        seated = len(self.residents) + len(self.prompts) + len(self.joining) + len(self.fetching)
        return seated + len(self.transfers.joining) + len(self.departures)

    @property
    def with_kv(self) -> list[Running]:
        """Return the requests that decode here, or are about to."""
        return [*self.residents.values(), *self.joining.values(), *self.transfers.joining]

    @property
    def is_changing(self) -> bool:
        """Return whether some request has pairs and is on its way here, or leaves them."""
        copies = self.joining or self.fetching or self.abandoned
        return bool(copies or self.transfers.occupants or self.departures)

    def pairs_needed(self, steps: int, block_size: int) -> int:
        """Return the pairs that decodes need to go on for so many steps."""
        return sum(
            running.num_held + steps > len(running.pairs) * block_size
            for running in self.residents.values()
            if not running.blocks
        )

    def remove(self, running: Running) -> bool:
        """Remove a request that may be in a step, and return whether it was a resident."""
        is_resident = running.request.id not in self.prompts
        del (self.residents if is_resident else self.prompts)[running.request.id]
        return is_resident

    def take(self, request: str, attempt: int) -> list[Running]:
        """Remove all requests of this name that may be in a step, up to this attempt."""
        return [*_taken(self.residents, request, attempt), *_taken(self.prompts, request, attempt)]

    def abandon(self, request: str, attempt: int) -> list[Running]:
        """Move joining and fetching requests of this name, up to this attempt, to `abandoned`; return them."""
        copies = [*self.joining.items(), *self.fetching.items()]
        abandoned = {number: running for number, running in copies if running.is_of(request, attempt)}
        for number in abandoned:
            self.joining.pop(number, None)
            self.fetching.pop(number, None)
        self.abandoned |= abandoned
        return [*abandoned.values()]

    # --- A shortage of memory

    def note_shortage(self) -> None:
        """Note that a request leaves for lack of memory: none is asked for before another one has ended."""
        self._short_at = self.num_seated

    @property
    def had_shortage(self) -> bool:
        """Return whether a request has left for lack of memory, and that is not forgotten yet."""
        return self._short_at > 0

    @property
    def is_short(self) -> bool:
        """Return whether as many requests are seated as when one left for lack of memory."""
        return 0 < self._short_at <= self.num_seated

    def forget_shortage(self) -> None:
        """Forget the shortage once fewer requests are seated."""
        if not self.is_short:
            self._short_at = 0


def _taken(seats: dict[str, Running], request: str, attempt: int) -> list[Running]:
    return [seats.pop(seat) for seat, running in [*seats.items()] if running.is_of(request, attempt)]
