"""What a custom policy is told, and the classes that one is written as: subclass one, and write its one method.

A policy is made once in each part that it decides for, and asked by that part alone. It may keep state, which a part
that starts again has lost. `problem` says what is wrong with an answer.

This is a stable interface: fields are added at the end, none is removed or changes its meaning. Facts cannot be
changed; times are seconds on the deployment's clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class RequestInLine:
    """A served or waiting request, as an order sees it. Only `is_late` changes by the passing of time alone."""

    id: str
    is_rt: bool  # a chat; otherwise a best-effort request
    priority: int  # chosen by the client, lower first
    arrival_at: float
    starts_by: float  # the next step has to begin by then, to keep the promise
    tokens_left: float  # predicted tokens still to run: of the prompt, and of the output
    is_prompt: bool  # part of the prompt is still to run
    is_late: bool  # the promise is missed


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that has come to the router, as a placement, an admission and a predictor see it."""

    id: str
    is_rt: bool
    priority: int
    arrival_at: float
    prompt: tuple[int, ...]  # token ids
    max_tokens: int
    expected_tokens: int  # of the output, as predicted so far
    ttft_s: float  # promised to a chat: the time to the first token ...
    tbt_s: float  # ... and between two tokens
    jct_s: float  # promised to a best-effort request: the time to the end


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """A worker that could run a prompt, as a placement sees it."""

    name: str
    wait_s: float  # predicted, until the worker begins with this prompt
    prompt_s: float  # predicted, to compute and copy this prompt
    num_requests: int  # that it has
    held_tokens: int  # of memory that these will need
    cached_tokens: int  # of this prompt that need not be computed there


@dataclass(frozen=True, slots=True)
class LoadAhead:
    """The load that a new request finds, as an admission sees it."""

    first_token_s: float  # predicted, from now to the first token
    prompt_s: float  # the part of that which the prompt itself takes
    num_open: int  # requests of all clients
    num_waiting: int  # requests of the class with prompts not begun, without lines of batch jobs
    free_tokens: float | None  # of memory on the worker that would run the request; None: not known


class PolicyKind(str, Enum):
    """The decisions that a policy may make."""

    ORDER = "order"
    SCHEDULER = "packing"  # the word between parts, as in the last release; schedulers/scheduler.py has the class
    PLACEMENT = "placement"
    ADMISSION = "admission"
    PREDICTOR = "predictor"

    @property
    def label(self) -> str:
        """Return the name for people and metrics."""
        return str(self.name).lower()


class OwnPolicy(ABC):
    kind: ClassVar[PolicyKind]
    method: ClassVar[str]
    usual_s: ClassVar[float] = 1e-3  # that an answer may take; more is slow
    made_with: ClassVar[tuple[object, ...]] = ()  # what one is made with to see that it can be made

    @staticmethod
    @abstractmethod
    def problem(answer: Any, *facts: Any) -> str | None:
        """Return why this is no answer to the question with these facts, or None."""


class OrderPolicy(OwnPolicy):
    """Decide which request is served first, wherever some have to wait. Every part asks it."""

    kind = PolicyKind.ORDER
    method = "key"
    usual_s = 1e-4  # it is asked for many requests in a step

    @abstractmethod
    def key(self, request: RequestInLine) -> float:
        """Return a number: requests with lower numbers go first, with equal numbers by arrival.

        The policy is asked again when something of the request has changed, so the number depends on nothing else.
        """

    @staticmethod
    def problem(answer: Any, *_facts: Any) -> str | None:
        return _not_a_number(answer)


class PlacementPolicy(OwnPolicy):
    """Decide which worker runs the prompt of a request, once for each attempt that is placed as it comes."""

    kind = PolicyKind.PLACEMENT
    method = "worker"

    @abstractmethod
    def worker(self, request: NewRequest, workers: Sequence[WorkerChoice]) -> str:
        """Return the name of one of these workers."""

    @staticmethod
    def problem(answer: Any, *_facts: Any) -> str | None:
        names = [worker.name for worker in _facts[1]]
        return None if answer in names else f"{answer!r:.60} is the name of no worker that was offered"


class AdmissionPolicy(OwnPolicy):
    """Decide which new requests are refused because of the load. Bounds of queues and of open requests hold besides.

    It is not asked about lines of batch jobs, which wait in their store.
    """

    kind = PolicyKind.ADMISSION
    method = "refuse"

    @abstractmethod
    def refuse(self, request: NewRequest, load: LoadAhead) -> float | None:
        """Return None to admit the request, or the seconds after which the client may try again."""

    @staticmethod
    def problem(answer: Any, *_facts: Any) -> str | None:
        if answer is None:
            return None
        return _not_a_number(answer) or (f"{answer} seconds have passed already" if answer < 0 else None)


class PredictorPolicy(OwnPolicy):
    """Predict how long the output of a request will be, where the client has not said so."""

    kind = PolicyKind.PREDICTOR
    method = "length"

    @abstractmethod
    def length(self, request: NewRequest) -> float:
        """Return the expected tokens of the output, 1 or more."""

    @staticmethod
    def problem(answer: Any, *_facts: Any) -> str | None:
        return _not_a_number(answer) or (f"{answer} tokens are no output" if answer < 1 else None)


KINDS: tuple[type[OwnPolicy], ...] = (OrderPolicy, PlacementPolicy, AdmissionPolicy, PredictorPolicy)


def _not_a_number(answer: Any) -> str | None:
    is_number = isinstance(answer, int | float) and isfinite(answer)
    return None if is_number else f"{answer!r:.60} is no finite number"
