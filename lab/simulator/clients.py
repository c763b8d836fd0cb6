"""Clients of a simulation: each sends a request, and checks that all its own tokens come once, and then the end."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from alignedserve.core import NO_OPENING, Estimate, Request, Sketch
from alignedserve.lab.loads.records.records import RequestOutcome, RequestRecord
from alignedserve.lab.loads.workload import Arrival, Load
from alignedserve.lab.processes import one_compute_thread
from alignedserve.lab.simulator.machines.clock import Priority
from alignedserve.lab.simulator.machines.engine import TokenStory, logprob_of, story_from, vector_of
from alignedserve.lab.simulator.machines.world import World
from alignedserve.lab.simulator.settings import FIRST_ARRIVAL_AT, Settings
from alignedserve.owner.core import OwnerCore
from alignedserve.protocol.commands import Deliver, Reject
from alignedserve.protocol.events import Closed, Opened
from alignedserve.scheduling.policy import Predictor

_RETRY_S = 0.25  # between two tries of a client whose gateway is not ready
_OVER = (RequestOutcome.FINISHED, RequestOutcome.REFUSED)  # nothing comes any more for such a request
_OPEN = RequestOutcome.OPEN  # looked up once: Python 3.11 takes as long for it as for three calls


class GivenLoad:
    """A given list of requests, in place of a load that is drawn."""

    notes: tuple[str, ...] = ()

    def __init__(self, asked: Iterable[Arrival]) -> None:
        self._asked = list(asked)
        self.expected = len(self._asked)

    def start(self, _now: float) -> list[Arrival]:
        return self._asked

    def arrived(self, _request: str) -> list[Arrival]:
        return []

    def ended(self, _request: str, _now: float, _answer: tuple[int, ...] | None) -> list[Arrival]:
        return []


@dataclass(slots=True)
class Client:
    """The client of one request: what has come so far, and how the request ended."""

    arrival: Arrival
    story: TokenStory
    outcome: RequestOutcome = RequestOutcome.OPEN
    opened: bool = False
    got: list[int] = field(default_factory=list)
    token_at: array[float] = field(default_factory=lambda: array("d"))  # when each token in `got` came
    ended_at: float = 0.0
    refused: str | None = None  # the reason
    asks_more: bool = field(init=False)  # than tokens. Computed once: most do not, and a check at every token is slow
    vector: bytes = field(init=False, default=b"")  # that comes with its token, if it asks for one

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        if self.request.pooling is not None:
            self.vector = vector_of(self.request.prompt)
        asks_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        self.asks_more = asks_logprobs or bool(self.vector)

    @property
    def request(self) -> Request:
        return self.arrival.request

    def record(self) -> RequestRecord:
        request = self.request
        return RequestRecord(
            id=request.id,
            service=request.service,
            slo=request.slo,
            arrival_at=request.arrival_at,
            num_prompt=len(request.prompt),
            token_at=self.token_at[:],  # as large as it has to be: an array that grows is larger
            outcome=self.outcome,
            ended_at=self.ended_at,
            refused=self.refused,
        )

    def problem(self) -> str | None:
        want, name = list(self.story.output), self.request.id
        if self.outcome is RequestOutcome.OPEN:
            return f"{name} has {len(self.got)} of {len(want)} tokens and never ended"
        if self.outcome is RequestOutcome.FINISHED and self.got != want:
            return f"{name} ended with {len(self.got)} tokens, not its {len(want)}"
        return None if self.got == want[: len(self.got)] else f"{name} got other tokens than its own"


class Clients:
    """All clients of a run; what goes wrong for a client is added to the problems of the run."""

    def __init__(self, world: World, settings: Settings, load: Load | GivenLoad, problems: list[str]) -> None:
        self.world, self.load = world, load
        self._agenda = world.agenda
        self._settings, self._problems = settings, problems
        self._sketch_of = _sketch_for(settings.policy.predictor)
        self.kept: dict[str, Client] = {}
        self.stories: dict[str, TokenStory] = {}
        self._over: list[RequestRecord] = []  # of clients that are no longer in `kept`
        self._num_over = 0  # such clients
        self.num_open = 0  # requests, also those that have not arrived yet
        self.on_progress: Callable[[int, int], None] = lambda _ended, _total: None
        self.on_end: Callable[[RequestRecord], None] | None = None  # hears of each request, instead of a list of them
        self.on_over: Callable[[Client], None] = lambda _: None  # hears of each that has ended, too

    def start(self) -> None:
        self.expect(self.load.start(FIRST_ARRIVAL_AT))

    def expect(self, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            request = arrival.request
            client = Client(arrival, story_from(request, arrival.length, tagged=self._settings.checked))
            self.kept[request.id], self.stories[request.id] = client, client.story
            self.num_open += 1
            self._agenda.at(request.arrival_at, Priority.CLIENT, partial(self._arrive, client))

    def enter(self, arrival: Arrival) -> Request:
        """Note a request that an owner opens by itself, and return the request as opened."""
        request = arrival.request
        client = Client(arrival, story_from(request, arrival.length, tagged=self._settings.checked), opened=True)
        self.kept[request.id], self.stories[request.id] = client, client.story
        self.num_open += 1
        return self._with_estimate(client, request)

    def _arrive(self, client: Client) -> None:
        self.expect(self.load.arrived(client.request.id))
        if not self._settings.gateway_s:
            return self._open(client)
        read_at = self._agenda.now + self._settings.gateway_s
        return self._agenda.at(read_at, Priority.CLIENT, partial(self._open, client))

    def _open(self, client: Client) -> None:
        gateway = self.world.alive(client.request.owner)
        if gateway is None or not isinstance(gateway.core, OwnerCore) or not gateway.core.ready:
            again = self._agenda.now + _RETRY_S
            return self._agenda.at(again, Priority.CLIENT, partial(self._open, client))
        client.opened = True
        if client.arrival.leaves_after_s is not None:
            leaves_at = self._agenda.now + client.arrival.leaves_after_s
            self._agenda.at(leaves_at, Priority.CLIENT, partial(self._leave, client))
        accepted_at = client.request.arrival_at + self.world.trouble.ahead_s(client.request.owner)
        request = self._with_estimate(client, replace(client.request, arrival_at=accepted_at))
        return gateway.post(Opened(request, self._sketch_of(request.prompt)))

    def _with_estimate(self, client: Client, request: Request) -> Request:
        if self._settings.policy.predictor is not Predictor.ORACLE:
            return request
        return replace(request, estimate=oracle_estimate(client.arrival))

    def leave(self, request: str) -> None:
        """Let the client of the request go before the end."""
        self._leave(self.kept[request])

    def left(self, request: str) -> None:
        """Note that an owner closes a request that it had opened by itself."""
        client = self.kept[request]
        if client.outcome is RequestOutcome.OPEN:
            self._end(client, RequestOutcome.LEFT)

    def _leave(self, client: Client) -> None:
        gateway = self.world.alive(client.request.owner)
        if client.outcome is RequestOutcome.OPEN and gateway is not None:
            self._end(client, RequestOutcome.LEFT)
            gateway.post(Closed(client.request.id))

    def died(self, name: str) -> None:
        """End the open requests of this member as broken, if it is a gateway."""
        for client in list(self.kept.values()):  # a copy: when a request ends, others may arrive
            if client.request.owner == name and client.opened and client.outcome is RequestOutcome.OPEN:
                self._end(client, RequestOutcome.BROKEN)

    def deliver(self, command: Deliver) -> None:
        client = self.kept.get(command.request)
        if client is None:
            return
        if client.outcome is not _OPEN:
            if client.outcome is RequestOutcome.LEFT:
                return
            self._problems.append(f"{command.request} got tokens after its end")
        if client.asks_more or command.logprobs or command.opening is not None:
            self._check_logprobs(client, command)
            vector = (command.opening or NO_OPENING).vector
            if (vector or client.vector) and (vector != client.vector or client.got):
                self._problems.append(f"{command.request} got another vector than its own, or a second one")
        client.got += command.tokens
        if len(command.tokens) == 1:
            client.token_at.append(self._agenda.now)
        else:
            client.token_at.extend([self._agenda.now] * len(command.tokens))
        if command.finish is not None:
            if command.finish is not client.request.finish(len(client.got) - 1, client.got[-1]):
                self._problems.append(f"{client.request.id} ended with {command.finish}")
            self._end(client, RequestOutcome.FINISHED)

    def _check_logprobs(self, client: Client, command: Deliver) -> None:
        """Check the log-probabilities that the request asks for; those of the prompt come with the first tokens."""
        sampling, start = client.request.sampling, len(client.got)
        of_prompt = (command.opening or NO_OPENING).logprobs
        places = range(start, start + len(command.tokens)) if sampling.logprobs is not None else ()
        brings_prompt = sampling.prompt_logprobs is not None and not start
        prompt_places = range(1, len(client.request.prompt)) if brings_prompt else ()
        expected = tuple(map(logprob_of, places)), tuple(map(logprob_of, prompt_places))
        if (command.logprobs, of_prompt) != expected:
            self._problems.append(f"{command.request} got other log-probabilities at {start} than are its own")

    def reject(self, command: Reject) -> None:
        client = self.kept.get(command.request)
        if client is not None and client.outcome is RequestOutcome.OPEN:
            client.refused = command.reason.value
            self._end(client, RequestOutcome.REFUSED)

    def _end(self, client: Client, outcome: RequestOutcome) -> None:
        client.outcome, client.ended_at = outcome, self._agenda.now
        self.on_over(client)
        self.num_open -= 1
        answer = tuple(client.got) if outcome is RequestOutcome.FINISHED else None
        self.expect(self.load.ended(client.request.id, client.ended_at, answer))
        if outcome in _OVER and not self._settings.checked:
            self._forget(client)
        num_all = self._num_over + len(self.kept)
        self.on_progress(num_all - self.num_open, self.load.expected or num_all)
        if self.on_end is not None:
            self.on_end(client.record())

    def _forget(self, client: Client) -> None:
        """Keep only the record of the client, if nobody else does: in a long run, tokens of ended requests would fill
        the memory."""
        self._problems += [problem] if (problem := client.problem()) else []
        self._num_over += 1
        if self.on_end is None:
            self._over.append(client.record())
        del self.kept[client.request.id], self.stories[client.request.id]

    def check(self) -> None:
        """Add the problems of the clients in `kept`, at the end of the run."""
        self._problems += [problem for client in self.kept.values() if (problem := client.problem())]

    def records(self) -> Iterator[RequestRecord]:
        yield from self._over
        for client in self.kept.values():
            yield client.record()


def _sketch_for(predictor: Predictor) -> Callable[[Sequence[int]], Sketch | None]:
    """Return what makes sketches of prompts; numpy is loaded only where lengths are predicted."""
    if predictor is not Predictor.HASH:
        return lambda _: None
    with one_compute_thread():  # of numpy: a second one would only take a core from another process
        from alignedserve.scheduling.sketch import sketch_of

    return sketch_of


def oracle_estimate(arrival: Arrival) -> Estimate:
    """Return the exact length of the output, or how a real predictor would be wrong about it."""
    exact = min(arrival.length, arrival.request.max_tokens)
    return arrival.predicted or Estimate(exact, exact)
