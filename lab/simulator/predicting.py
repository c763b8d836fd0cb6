"""The length predictor of a simulated deployment: it performs commands with the code of the router's side process.

It answers a little later, in the order of the commands, and dies with its router. The next router's predictor starts
with the lengths that it had kept by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from alignedserve.core import Estimate, Sketch
from alignedserve.lab.loads.workload import Arrival
from alignedserve.lab.loads.workload.tape import VOCABULARY
from alignedserve.lab.simulator.machines.clock import Agenda, Priority
from alignedserve.machine.one_thread import one_compute_thread
from alignedserve.protocol.commands import Command, Learn, Predict, Retrain
from alignedserve.protocol.events import Event, Predicted
from alignedserve.scheduling.policy import Predictor
from alignedserve.shell.turn import NoHands

if TYPE_CHECKING:  # numpy is loaded where lengths are predicted
    from alignedserve.router.prediction.predictor import HashEncoder, LengthModel

ANSWER_S = 2e-3  # from an order to its answer
MOST_KEPT = 50_000  # outputs
_MOST_PAST = 60  # tokens of prompts and outputs from before the run
Encode = Callable[[Sequence[int]], Sketch | None]  # how a gateway makes a sketch of a prompt


@dataclass(frozen=True)
class Knowledge:
    """The encoder of a deployment's prompts, and the lengths that it has learnt before the run."""

    encode: Encode
    encoder: Callable[[], HashEncoder]
    past: tuple[Learn, ...] = ()


def knowledge_of(predictor: Predictor, num_past: int, seed: int) -> Knowledge:
    """Return what this predictor knows at the start. Simulated prompts have no text, so it predicts from tokens."""
    if predictor is not Predictor.HASH:
        return Knowledge(lambda _: None, _hash_encoder)
    with one_compute_thread():  # as in the router's side process; here numpy is loaded, as a rule
        from alignedserve.scheduling.sketch import sketch_of

    return Knowledge(sketch_of, _hash_encoder, _past_of(num_past, seed, sketch_of))


def _hash_encoder() -> HashEncoder:
    from alignedserve.router.prediction.predictor import HashEncoder

    return HashEncoder()


def oracle_estimate(arrival: Arrival) -> Estimate:
    """Return the exact length of the output, or how a real predictor would be wrong about it."""
    exact = min(arrival.length, arrival.request.max_tokens)
    return arrival.predicted or Estimate(exact, exact)


def _past_of(count: int, seed: int, encode: Encode) -> tuple[Learn, ...]:
    """Draw earlier outputs of random prompts: they teach nothing, but with them the predictor can answer."""
    draw, past = Random(f"{seed}/past"), list[Learn]()
    for _ in range(count):
        prompt = draw.choices(range(1, VOCABULARY), k=draw.randint(1, _MOST_PAST))
        sketch = encode(prompt)
        if sketch is not None:
            past.append(Learn(sketch, len(prompt), draw.randint(1, _MOST_PAST)))
    return tuple(past)


class PredictorHands(NoHands):
    """The predictor of one life of the router; `post` brings the router an event if it is still alive."""

    def __init__(
        self, agenda: Agenda, encoder: Callable[[], HashEncoder], kept: list[Learn], post: Callable[[Event], None]
    ) -> None:
        """`kept` are the lengths that a predictor has stored; they outlive its router."""
        self._agenda, self._encoder, self._kept, self._post = agenda, encoder, kept, post
        self._learnt = deque(kept, MOST_KEPT)
        self._made: LengthModel | None = None

    @property
    def _model(self) -> LengthModel:
        if self._made is None:
            from alignedserve.router.prediction.predictor import LengthModel, num_older

            self._made = LengthModel(self._encoder())
            kept = tuple(self._learnt)
            for learn in kept[: num_older(len(kept))]:
                self._learn(learn)
            self._made.fit()
            for learn in kept[num_older(len(kept)) :]:
                self._learn(learn)
            self._made.fit()
        return self._made

    def perform(self, command: Command) -> None:
        match command:
            case Predict(request, attempt, sketch, num_prompt):
                estimate = self._model.predict([sketch], [num_prompt])[0]
                if estimate is not None:
                    predicted = Predicted(request, attempt, estimate)
                    self._agenda.at(self._agenda.now + ANSWER_S, Priority.WORK, lambda: self._post(predicted))
            case Learn():
                self._learn(command)
                self._learnt.append(command)
            case Retrain():
                self._model.fit()
                self._kept[:] = self._learnt
            case _:
                raise TypeError(f"a router cannot perform {command}")

    def _learn(self, learn: Learn) -> None:
        self._model.learn([learn.sketch], [learn.num_prompt], [learn.num_output])
