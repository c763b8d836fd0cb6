"""The requests on a worker by their states: the one place that takes a request from state to state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from itertools import chain, count

from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import Attempt
from alignedserve.worker.part import CorePart
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State

_ABSENT = (State.NEW, State.CANDIDATE, State.KEPT, State.ABANDONED, State.GONE)
PRESENT = tuple(state for state in State if state not in _ABSENT)
_LOOSE = (State.COMPILING, State.ASKING, State.WAITING)
OCCUPYING = (*(state for state in PRESENT if state not in _LOOSE), State.KEPT, State.ABANDONED)


class Requests:
    """Each state's requests are in the order in which they came to it. Those in a step are found by their names."""

    def __init__(self) -> None:
        self.parts: tuple[CorePart, ...] = ()  # of the core
        self.is_retiring = False  # the worker takes nothing new
        self.is_reserved = False  # nothing joins but the prompts that the router sends, which run alone
        self.residents: dict[str, WorkerRequest] = {}
        self.prompts: dict[str, WorkerRequest] = {}
        self._named = {State.RESIDENT: self.residents, State.PROMPT: self.prompts}
        self._others = {state: OrderedDict[WorkerRequest, None]() for state in State if state not in self._named}
        self.copy_numbers = count(1)  # of copies from the pool
        self.copies: dict[int, WorkerRequest] = {}  # under way to blocks of these requests
        self.from_lost_pool: frozenset[int] = frozenset()  # copies that were under way when their pool was lost

    def move(self, running: WorkerRequest, state: State, first: bool = False) -> None:
        """Take a request to another state, behind the others there or before them (`first`)."""
        before, name = running.state, running.request.id
        running.becomes(state)
        if before in self._named:
            self._named[before].pop(name, None)
        else:
            self._others[before].pop(running, None)
        if state in self._named:
            self._named[state][name] = running
        elif state is not State.GONE:
            self._others[state][running] = None
            if first:
                self._others[state].move_to_end(running, last=False)

    def put_last(self, running: WorkerRequest) -> None:
        """Put a request behind the others of its state."""
        self._others[running.state].move_to_end(running)

    def among(self, state: State) -> Collection[WorkerRequest]:
        """Return the requests in this state; the collection changes with them."""
        return self._named[state].values() if state in self._named else self._others[state].keys()

    def of(self, *states: State) -> list[WorkerRequest]:
        """Return the requests in these states, one state after the other."""
        return [*chain.from_iterable(map(self.among, states))]

    def attempts(self) -> list[Attempt]:
        """Return the attempts of all requests that go on here."""
        return [running.key for running in self.of(*PRESENT)]

    @property
    def may_try(self) -> bool:
        """Return whether the worker is idle, and goes on."""
        return not self.is_retiring and not self.attempts()

    def occupants(self) -> list[WorkerRequest]:
        """Return the requests that have blocks, but for unwanted ones whose blocks a transfer still uses."""
        return self.of(*OCCUPYING)

    def find(self, request: str) -> WorkerRequest | None:
        """Return the request of this name that may be in a step."""
        return self.residents.get(request) or self.prompts.get(request)

    @property
    def unfinished(self) -> list[WorkerRequest]:
        """Return the prompts that have blocks and whose first token has not come."""
        return self.of(State.PROMPT, State.FETCHING)

    def drop_from(
        self, states: Iterable[State], request: str, attempt: int, to: State = State.GONE
    ) -> list[WorkerRequest]:
        """Take all requests of this name in these states, up to this attempt, to the state `to`; return them."""
        dropped = [running for running in self.of(*states) if running.is_of(request, attempt)]
        for running in dropped:
            self.move(running, to)
        return dropped

    # --- Copies from the pool

    def begin_copy(self, running: WorkerRequest, state: State) -> int:
        """Return the number of a copy of the request's KV from the pool; until it has ended the request is `state`."""
        number = next(self.copy_numbers)
        self.copies[number] = running
        self.move(running, state)
        return number

    def end_copy(self, number: int, state: State) -> WorkerRequest | None:
        """Return the request whose copy has ended, if it is in this state."""
        running = self.copies.get(number)
        return self.copies.pop(number) if running is not None and running.state is state else None

    def pool_lost(self, *_: object) -> None:
        """Note that the copies under way come from a lost pool: the next pool is told nothing about them."""
        self.from_lost_pool = frozenset(self.copies)

    # --- What concerns all parts of the core

    def enlist(self, *parts: CorePart) -> None:
        self.parts = parts

    def drop(self, request: str, attempt: int) -> list[Command]:
        """Forget the request up to this attempt, wherever it is."""
        return [command for part in self.parts for command in part.drop(request, attempt)]

    def ask_again(self) -> None:
        for part in self.parts:
            part.ask_again()

    def repeat(self, to: str) -> list[Command]:
        return [command for part in self.parts for command in part.repeat(to)]

    @property
    def awaits_answer(self) -> bool:
        return any(part.awaits_answer for part in self.parts)
