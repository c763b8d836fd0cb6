"""Follow a request from its arrival to its end, and say its spans: its own, and one for each stage.

    llm_request  │──────────────────────────────────────────────│
    queue        │────────│
    prefill               │───────────│
    decode                            │─────────────────────────│

The span of the request and its attributes have the names that vLLM gives them, so that boards made for vLLM read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeAlias

from alignedserve.core import Request
from alignedserve.owner.client import Delivered, Overloaded

ROOT = "llm_request"
Attributes: TypeAlias = Mapping[str, str | int | float]
_ABORT = "abort"  # the finish of a request whose client left


@dataclass(frozen=True)
class Span:
    name: str
    began_at: float
    ended_at: float
    attributes: Attributes = field(default_factory=dict)
    error: str | None = None


Emit: TypeAlias = Callable[[Span, Sequence[Span]], None]  # the span of a request, and those of its stages


class RequestTrace:
    """Follows the request while it is open, that is inside of `with`, and emits its spans at the end."""

    def __init__(self, request: Request, model: str, choices: int, now: Callable[[], float], emit: Emit) -> None:
        self._request, self._model, self._choices, self._now, self._emit = request, model, choices, now, emit
        self._waited_s = 0.0
        self._first_at: float | None = None
        self._num_output, self._num_cached, self._finish = 0, 0, _ABORT

    def __enter__(self) -> RequestTrace:
        return self

    def deliver(self, delivered: Delivered) -> None:
        if self._first_at is None:
            self._first_at = self._now()
            self._waited_s, self._num_cached = delivered.opening.waited_s, delivered.opening.num_cached
        self._num_output += len(delivered.tokens)

    def finish(self, finish: str) -> None:
        """Note how the output ends; without it, its client has left."""
        self._finish = finish

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        ended_at, came_at = self._now(), self._request.arrival_at
        why = str(error) if isinstance(error, Exception) else None
        end = {"gen_ai.response.finish_reason": self._finish} if why is None else {"error.type": _kind_of(error)}
        root = Span(ROOT, came_at, ended_at, {**self._about(), **self._latencies(ended_at), **end}, why)
        self._emit(root, self._stages(ended_at))

    def _about(self) -> Attributes:
        request, sampling = self._request, self._request.sampling
        return {
            "gen_ai.request.id": request.id,
            "gen_ai.request.n": self._choices,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.num_sequences": 1,
            "gen_ai.usage.prompt_tokens": len(request.prompt),
            "gen_ai.usage.completion_tokens": self._num_output,
            "alignedserve.class": request.service.value,
            "alignedserve.cached_tokens": self._num_cached,
        }

    def _latencies(self, ended_at: float) -> Attributes:
        came_at, first_at = self._request.arrival_at, self._first_at
        all_s = {"gen_ai.latency.e2e": ended_at - came_at}
        if first_at is None:
            return all_s
        began_at = self._began_at(first_at)
        return {
            **all_s,
            "gen_ai.latency.time_in_queue": began_at - came_at,
            "gen_ai.latency.time_to_first_token": first_at - came_at,
            "gen_ai.latency.time_in_model_prefill": first_at - began_at,
            "gen_ai.latency.time_in_model_decode": ended_at - first_at,
            "gen_ai.latency.time_in_model_inference": ended_at - began_at,
        }

    def _stages(self, ended_at: float) -> Sequence[Span]:
        came_at, first_at = self._request.arrival_at, self._first_at
        if first_at is None:
            return (Span("queue", came_at, ended_at),)
        began_at = self._began_at(first_at)
        return (
            Span("queue", came_at, began_at),
            Span("prefill", began_at, first_at),
            Span("decode", first_at, ended_at),
        )

    def _began_at(self, first_at: float) -> float:
        """Return when the first chunk of its prompt began."""
        return min(self._request.arrival_at + self._waited_s, first_at)


def _kind_of(error: BaseException | None) -> str:
    return error.reason.value if isinstance(error, Overloaded) else type(error).__name__
