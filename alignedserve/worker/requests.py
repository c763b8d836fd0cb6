"""The requests on a worker by their states: the one place that takes a request from state to state.

Each request is found here by name, whatever the state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import chain, count

from alignedserve.core import Chunk
from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import Attempt
from alignedserve.worker.candidates import Candidates, RunningBatch
from alignedserve.worker.step.request import Departure, JoinCandidate, WorkerRequest
from alignedserve.worker.step.states import State
from alignedserve.worker.step.waiting_prompts import WaitingPrompts

_ABSENT = (State.NEW, State.KEPT, State.ABANDONED, State.GONE)
PRESENT = tuple(state for state in State if state not in _ABSENT)  # as the router knows them
_SEATED = (State.RESIDENT, State.PROMPT, State.JOINING, State.FETCHING, State.RECEIVING)
OCCUPYING = (*_SEATED, State.KEPT, State.DEPARTING)  # has blocks, and may need them
_CHANGING = (State.JOINING, State.FETCHING, State.RECEIVING, State.DEPARTING, State.ABANDONED)


class Requests:
    """The requests of each state are in order of arrival there. Requests in a step are found by name."""

    waiting: WaitingPrompts  # the requests in State.WAITING, in the order of service too
    drop: Callable[[str, int], list[Command]]  # forgets a request up to an attempt, in any state

    def __init__(self) -> None:
        self.is_retiring = False  # the worker takes nothing new
        self.is_reserved = False  # nothing joins but the prompts that the router sends, which run alone
        self.residents: dict[str, WorkerRequest] = {}
        self.prompts: dict[str, WorkerRequest] = {}
        self._named = {State.RESIDENT: self.residents, State.PROMPT: self.prompts}
        others = (state for state in State if state is not State.WAITING and state not in self._named)
        self._others = {state: OrderedDict[WorkerRequest, None]() for state in others}
        self._by_name: dict[str, list[WorkerRequest]] = {}  # all that are not gone
        self._seated = [self.among(state) for state in (*_SEATED, State.DEPARTING)]
        self._abandoned = self.among(State.ABANDONED)
        self.copy_numbers = count(1)  # of copies from the pool
        self.copies: dict[int, WorkerRequest] = {}  # under way to blocks of these requests
        self.from_lost_pool: frozenset[int] = frozenset()  # copies that were under way when the pool was lost
        self.candidates, self.batch = Candidates(self), RunningBatch()
        self._short_at = 0  # how many were seated when a request last left for lack of memory; 0: forgotten

    def move(self, running: WorkerRequest, state: State, first: bool = False) -> None:
        """Take a request to another state, behind the requests there; with `first`, before the others that wait."""
        before, name = running.state, running.request.id
        running.becomes(state)
        if before is State.NEW:
            self._by_name.setdefault(name, []).append(running)
        if before is State.WAITING:
            self.waiting.remove(running)
        elif before in self._named:
            self._named[before].pop(name, None)
        else:
            self._others[before].pop(running, None)
        if state is State.WAITING:
            (self.waiting.add_first if first else self.waiting.add)(running)
        elif state in self._named:
            self._named[state][name] = running
        elif state is not State.GONE:
            self._others[state][running] = None
        else:
            self._by_name[name].remove(running)
            if not self._by_name[name]:
                del self._by_name[name]

    def put_last(self, running: WorkerRequest) -> None:
        """Put a request behind the others of the same state."""
        self._others[running.state].move_to_end(running)

    def among(self, state: State) -> Collection[WorkerRequest]:
        """Return the requests in this state: the live collection, no copy."""
        if state is State.WAITING:
            return self.waiting
        return self._named[state].values() if state in self._named else self._others[state].keys()

    def of(self, *states: State) -> list[WorkerRequest]:
        """Return the requests in these states, state by state."""
        return [*chain.from_iterable(map(self.among, states))]

    def attempts(self) -> list[Attempt]:
        """Return all attempts that are here."""
        return [running.key for running in self.of(*PRESENT)]

    def named(self, request: str, *states: State) -> Sequence[WorkerRequest]:
        """Return the attempts of this request in these states."""
        return [running for running in self._by_name.get(request, ()) if running.state in states]

    def find_attempt(self, attempt: Attempt, *states: State) -> WorkerRequest | None:
        """Return the request of this attempt, if the request is in one of these states."""
        return next((running for running in self.named(attempt[0], *states) if running.key == attempt), None)

    def newest(self, request: str) -> int:
        """Return the number of the newest attempt of this request that is here, or -1."""
        return max((running.request.attempt for running in self.named(request, *PRESENT)), default=-1)

    def find(self, request: str) -> WorkerRequest | None:
        """Return the request of this name that may be in a step."""
        return self.residents.get(request) or self.prompts.get(request)

    @property
    def unfinished(self) -> list[WorkerRequest]:
        """Return the prompts that have blocks and no first token yet."""
        return self.of(State.PROMPT, State.FETCHING)

    def occupants(self) -> list[WorkerRequest]:
        """Return the requests with blocks. Unwanted requests count only where no page is copied to their blocks."""
        copied = self.copies.values()
        return [*self.of(*OCCUPYING), *(running for running in self.among(State.ABANDONED) if running not in copied)]

    def running_of(self, chunk: Chunk) -> WorkerRequest:
        """Return the request of this chunk."""
        running = self.find(chunk.request)
        assert running is not None, "a chunk was chosen of a request that is not here"
        return running

    @property
    def seated(self) -> list[WorkerRequest]:
        """Return the requests that may be in a step."""
        return [*self.residents.values(), *self.prompts.values()]

    @property
    def best_effort(self) -> list[WorkerRequest]:
        """Return the best-effort requests that may be in a step, and so can leave."""
        return [running for running in self.seated if not running.promise.is_rt]

    @property
    def num_seated(self) -> int:
        """Return how many requests have a seat, also departing requests, which may have to stay."""
        unwanted = [running.departure for running in self._abandoned]  # few, and read for a moment more
        return sum(map(len, self._seated)) + sum(of is not None and of.number is not None for of in unwanted)

    @property
    def num_fetching(self) -> int:
        return len(self.among(State.FETCHING))

    @property
    def with_kv(self) -> list[WorkerRequest]:
        """Return the requests that decode here, or are about to."""
        return self.of(State.RESIDENT, State.JOINING, State.RECEIVING)

    @property
    def kept(self) -> Collection[WorkerRequest]:
        """Return the ended requests with an answer that is copied to the pool."""
        return self.among(State.KEPT)

    @property
    def coming(self) -> list[JoinCandidate]:
        """Return the requests with a transfer that writes to their blocks, wanted or not."""
        candidates = [running.candidate for running in self.of(State.RECEIVING, State.ABANDONED)]
        return [candidate for candidate in candidates if candidate is not None and candidate.transfer is not None]

    @property
    def departures(self) -> list[Departure]:
        """Return the departures of requests that still have blocks, wanted or not."""
        departures = [running.departure for running in self.of(State.DEPARTING, State.ABANDONED)]
        return [of for of in departures if of is not None and (of.is_wanted or of.number is not None)]

    @property
    def is_changing(self) -> bool:
        """Return whether some request with blocks is on its way here or away."""
        return any(map(self.among, _CHANGING))

    # --- Copies from the pool

    def begin_copy(self, running: WorkerRequest, state: State) -> int:
        """Return the number of a copy of the request's KV from the pool; until its end the request is `state`."""
        number = next(self.copy_numbers)
        self.copies[number] = running
        self.move(running, state)
        return number

    def end_copy(self, number: int) -> WorkerRequest | None:
        """Return the request of the copy that has ended; None where it was no request's copy."""
        return self.copies.pop(number, None)

    def pool_lost(self, *_: object) -> None:
        """Note that the copies under way come from a lost pool: the next pool is told nothing about these copies."""
        self.from_lost_pool = frozenset(self.copies)

    # --- A shortage of memory

    def note_shortage(self) -> None:
        """Note that a request leaves for lack of memory: no request is asked for before another has ended."""
        self._short_at = self.num_seated

    @property
    def had_shortage(self) -> bool:
        """Return whether a request has left for lack of memory, and that is not forgotten yet."""
        return self._short_at > 0

    @property
    def is_short(self) -> bool:
        """Return whether as many requests are seated as when a request last left for lack of memory."""
        return 0 < self._short_at <= self.num_seated

    def forget_shortage(self) -> None:
        """Forget the shortage once fewer requests are seated."""
        if not self.is_short:
            self._short_at = 0
