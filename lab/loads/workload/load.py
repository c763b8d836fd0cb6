"""Workloads, and the load that a running workload makes.

A `Load` hears what happens to requests and says which arrive next, now or later. Of each open stream only one request
is kept ahead, so that an hour of requests takes no more memory than a second.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from random import Random

from alignedserve.core import Estimate, Request, Sampling
from alignedserve.cost.sums import added
from alignedserve.errors import WorkloadError
from alignedserve.lab.loads.workload.amounts import DrawnSizes, Exponential
from alignedserve.lab.loads.workload.pace import LEAST_RATE, MOST_RATE, Gamma
from alignedserve.lab.loads.workload.stream import ClientLimits, Span, Stream
from alignedserve.lab.loads.workload.tape import STOP, StreamText
from alignedserve.lab.loads.workload.windows import varied


@dataclass(frozen=True)
class Arrival:
    """An arriving request, and how client and output will behave."""

    request: Request
    length: int  # of the output, if max_tokens allows
    leaves_after_s: float | None  # when the client leaves before the end
    is_cut: bool = False  # whether the prompt or the possible output was cut to fit the context
    predicted: Estimate | None = None  # what an oracle says of the output; None: the length


class Visit:
    """A visit of a user: a request, or a conversation of several requests, one after the other.

        prompt of turn 0    system, new
        prompt of turn 1    system, new, answer, new
        prompt of turn 2    system, new, answer, new, answer, new

    Its tokens depend on the seed, the stream, its number and the answers that it gets, not on time.
    """

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
        draw = self._draw
        request = Request(
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
        self.num_asked += 1
        predicted = self._stream.foresight.predicted.draw(output, request.sampling.seed)
        return Arrival(request, output, self._leaves_after_s(), is_cut, predicted)

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


@dataclass(frozen=True)
class Mixture:
    """A workload of several streams."""

    streams: tuple[Stream, ...]

    def __post_init__(self) -> None:
        for name, times in Counter(stream.name for stream in self.streams).items():
            if times > 1:
                raise WorkloadError(f"{times} streams are called {name}: give each a name of its own")

    @property
    def rate(self) -> float:
        """Return the sum of the rates of all streams that have a rate."""
        return added(stream.arrivals.mean_rate or 0.0 for stream in self.streams)

    def scaled(self, factor: float) -> Mixture:
        """Return the mixture with its rate times this factor; closed streams stay as they are."""
        return Mixture(tuple(stream.scaled(factor) for stream in self.streams))

    def at_rate(self, rate: float) -> Mixture:
        if not self.rate:
            raise WorkloadError("rate cannot be set: no stream of this workload has a rate")
        if not LEAST_RATE <= rate <= MOST_RATE:
            raise WorkloadError(
                f"rate must be from {LEAST_RATE} to {MOST_RATE:,.0f} arrivals in a second, not {rate:g}"
            )
        return self.scaled(rate / self.rate)

    def within(self, context: int) -> Mixture:
        """Return the mixture for a deployment whose requests have at most `context` tokens."""
        return Mixture(tuple(stream.within(context) for stream in self.streams))


@dataclass(frozen=True)
class Workload:
    """One stream of small requests, for tests of the system itself."""

    num_requests: int = 100
    rate: float = 20.0  # arrivals in a second
    mean_prompt: int = 60
    most_prompt: int = 400
    mean_output: int = 20
    most_output: int = 100
    limited_share: float = 0.2  # of the requests: max_tokens may cut the output
    leaving_share: float = 0.0  # of the clients: they leave before the end
    patience_s: float = 0.5  # until they leave, on average

    @property
    def streams(self) -> tuple[Stream, ...]:
        prompt = Exponential(self.mean_prompt, self.most_prompt)
        output = Exponential(self.mean_output, self.most_output)
        clients = ClientLimits(
            max_tokens=self.most_output,
            limited_share=self.limited_share,
            leaving_share=self.leaving_share,
            patience_s=self.patience_s,
        )
        span = Span(num_requests=self.num_requests)
        return (Stream(arrivals=Gamma(self.rate), lengths=DrawnSizes(prompt, output), clients=clients, span=span),)


class Load:
    """A running workload: it says which requests arrive next."""

    def __init__(self, workload: Mixture | Workload, owners: Sequence[str], seed: int) -> None:
        self._streams = [_StreamLoad(stream, owners, seed) for stream in workload.streams]
        self._by_request: dict[str, _StreamLoad] = {}  # open request -> the stream's load

    def start(self, now: float) -> list[Arrival]:
        return [arrival for load in self._streams for arrival in self._remember(load, load.start(now))]

    def arrived(self, request: str) -> list[Arrival]:
        """Hear that a request has arrived, once for each request, and return the arrivals that follow."""
        load = self._by_request[request]
        return self._remember(load, load.arrived(request))

    def ended(self, request: str, now: float, answer: tuple[int, ...] | None) -> list[Arrival]:
        """Hear that a request has ended, with the complete answer or None, and return the arrivals that follow."""
        load = self._by_request.pop(request)
        return self._remember(load, load.ended(request, now, answer))

    def forget(self, request: str) -> None:
        """Forget a request that will report no end."""
        self._by_request.pop(request).forget(request)

    @cached_property
    def expected(self) -> int | None:
        """Return the number of all requests, if known beforehand."""
        each = [load.stream.num_requests for load in self._streams]
        return None if None in each else sum(number or 0 for number in each)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the reader of the figures."""
        return tuple(note for load in self._streams for note in load.notes)

    def _remember(self, load: _StreamLoad, arrivals: list[Arrival]) -> list[Arrival]:
        self._by_request |= {arrival.request.id: load for arrival in arrivals}
        return arrivals


class _StreamLoad:
    """The load of a running stream."""

    def __init__(self, stream: Stream, owners: Sequence[str], seed: int) -> None:
        self._seed = f"{seed}/workload/{stream.name}"
        self.stream, self._owners = varied(stream, Random(f"{self._seed}/windows")), owners
        self._pace = self.stream.arrivals.pace(Random(self._seed))
        self._text = StreamText(self._seed, stream.turns.system, self.stream.blocks)
        self._open: dict[str, tuple[Visit, Request]] = {}
        self._num_begun = self._num_cut = 0
        self._started_at = 0.0

    def start(self, now: float) -> list[Arrival]:
        self._started_at = now
        return self._begin(self._pace.start(now))

    def arrived(self, request: str) -> list[Arrival]:
        visit, _ = self._open[request]
        return self._begin(self._pace.arrived()) if visit.num_asked == 1 else []

    def ended(self, request: str, now: float, answer: tuple[int, ...] | None) -> list[Arrival]:
        visit, asked = self._open.pop(request)
        following = None if answer is None else visit.next_turn(now, asked, answer)
        if following is not None:
            return [self._remember(visit, following)]
        return self._begin(self._pace.ended(now, failed=answer is None))

    def forget(self, request: str) -> None:
        del self._open[request]

    def _begin(self, times: list[float]) -> list[Arrival]:
        return [self._next(at) for at in times if self._may_begin(at)]

    def _may_begin(self, at: float) -> bool:
        span = self.stream.span
        in_number = span.num_requests is None or self._num_begun < span.num_requests
        return in_number and (span.first_s is None or at - self._started_at <= span.first_s)

    def _next(self, at: float) -> Arrival:
        number = self._num_begun
        self._num_begun += 1
        owner, draw = self._owners[number % len(self._owners)], Random(f"{self._seed}/{number}")
        visit = Visit(self.stream, number, owner, draw, self._text)
        return self._remember(visit, visit.ask(at))

    @property
    def notes(self) -> tuple[str, ...]:
        stream, cut = self.stream, self._num_cut
        note = f"{stream.name}: {cut:,} of its requests were cut to a context of {stream.clients.context:,} tokens"
        return (*stream.notes, note) if cut else stream.notes

    def _remember(self, visit: Visit, arrival: Arrival) -> Arrival:
        self._num_cut += arrival.is_cut
        self._open[arrival.request.id] = (visit, arrival.request)
        return arrival


def arrivals(workload: Mixture | Workload, owners: Sequence[str], seed: int, start_at: float) -> Iterator[Arrival]:
    """Yield all arrivals if no request ever ended: every request of open streams, the first lot of closed streams."""
    load, serials = Load(workload, owners, seed), count()
    coming = [(arrival.request.arrival_at, next(serials), arrival) for arrival in load.start(start_at)]
    heapq.heapify(coming)
    while coming:
        _, _, arrival = heapq.heappop(coming)
        yield arrival
        for following in load.arrived(arrival.request.id):
            heapq.heappush(coming, (following.request.arrival_at, next(serials), following))
        load.forget(arrival.request.id)
