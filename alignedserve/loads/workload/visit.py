"""A visit of a user: a request, or a conversation of several requests, one after the other.

prompt of turn 0    system, new
prompt of turn 1    system, new, answer, new
prompt of turn 2    system, new, answer, new, answer, new
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from alignedserve.core import Estimate, Request, Sampling
from alignedserve.loads.workload.stream import Stream
from alignedserve.loads.workload.tape import STOP, StreamText


@dataclass(frozen=True)
class Arrival:
    """An arriving request, and how client and output will behave."""

    request: Request
    length: int  # of the output, if max_tokens allows
    leaves_after_s: float | None  # when the client leaves before the end
    is_cut: bool = False  # whether the prompt or the possible output was cut to fit the context
    predicted: Estimate | None = None  # what an oracle says of the output; None: the length


class Visit:
    """A visit. Its tokens depend on the seed, the stream, its number and the answers that it gets, not on time."""

    def __init__(self, stream: Stream, number: int, owner: str, draw: Random, text: StreamText) -> None:
        self._stream, self._number, self._owner, self._draw, self._text = stream, number, owner, draw, text
        self._num_turns = stream.num_turns(number, draw)
        self._conversation = text.system
        self.num_asked = 0

    def ask(self, at: float) -> Arrival:
        """Return the first turn."""
        prompt, output = self._stream.lengths.pair(self._number, self._draw, self.num_asked)
        wanted = min(output, self._stream.clients.max_tokens)
        num_output = min(wanted, self._room - 1)
        is_cut = prompt + wanted > self._room
        return self._arrival(at, min(prompt, self._room - num_output), output, is_cut)

    def next_turn(self, now: float, request: Request, answer: tuple[int, ...]) -> Arrival | None:
        """Return the next turn after an answer; None if all turns are done or the context is full."""
        if self.num_asked == self._num_turns:
            return None
        self._conversation = request.prompt + answer
        prompt, output = self._stream.lengths.pair(self._number, self._draw, self.num_asked)
        if prompt + min(output, self._stream.clients.max_tokens) > self._room:
            return None
        return self._arrival(now + self._stream.turns.think_s.draw(self._draw), prompt, output)

    @property
    def _room(self) -> int:
        return self._stream.clients.context - len(self._conversation)

    def _arrival(self, at: float, prompt: int, output: int, is_cut: bool = False) -> Arrival:
        request = self._request(at, prompt)
        self.num_asked += 1
        predicted = self._stream.foresight.predicted.draw(output, request.sampling.seed)
        return Arrival(request, output, self._leaves_after_s(), is_cut, predicted)

    def _request(self, at: float, prompt: int) -> Request:
        draw = self._draw
        return Request(
            id=self._next_id,
            owner=self._owner,
            attempt=0,
            prompt=self._conversation + self._text.prompt(self._number, prompt, draw),
            emitted=(),
            sampling=Sampling(seed=draw.getrandbits(31)),
            max_tokens=self._max_tokens(self._room - prompt),
            stop_tokens=(STOP,),
            service=self._stream.promise.service,
            slo=self._stream.promise.draw(draw),
            arrival_at=at,
            salt=self._stream.clients.caller,
        )

    @property
    def _next_id(self) -> str:
        first = f"{self._stream.name}-{self._number}"
        return f"{first}.{self.num_asked}" if self.num_asked else first

    def _max_tokens(self, room: int) -> int:
        clients = self._stream.clients
        most = min(clients.max_tokens, room)
        return self._draw.randint(1, most) if self._draw.random() < clients.limited_share else most

    def _leaves_after_s(self) -> float | None:
        clients = self._stream.clients
        leaves = self._draw.random() < clients.leaving_share
        return self._draw.expovariate(1 / clients.patience_s) if leaves else None
