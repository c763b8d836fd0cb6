"""Define the plain facts that a policy gets and cannot change. Times are seconds on the deployment's clock.

This is a stable interface: fields are added at the end, none is removed or changes its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestInLine:
    """A request that is served, or waits to be, as an order sees it. None of it changes by the passing of time alone,
    but whether it is late."""

    id: str
    is_rt: bool  # a chat; otherwise a best-effort request
    priority: int  # chosen by the client, lower first
    arrival_at: float
    starts_by: float  # its next step has to begin by then, to keep what was promised
    tokens_left: float  # predicted tokens still to run: of its prompt, and of its output
    is_prompt: bool  # something of its prompt is still to run
    is_late: bool  # it has missed what was promised


@dataclass(frozen=True, slots=True)
class SeatedRequest:
    """A request with memory on a decode worker, as a packing sees it."""

    id: str
    is_rt: bool
    priority: int
    arrival_at: float
    num_tokens: int  # of its prompt and its output so far
    num_output: int  # tokens of its output so far
    tokens_ahead: int  # of its prompt, still to run; 0: it decodes


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that has come to the router, as a placement, an admission and a predictor see it."""

    id: str
    is_rt: bool
    priority: int
    arrival_at: float
    prompt: tuple[int, ...]  # token ids
    max_tokens: int
    expected_tokens: int  # of its output, as predicted so far
    ttft_s: float  # promised to a chat: the time to its first token ...
    tbt_s: float  # ... and between two tokens
    jct_s: float  # promised to a best-effort request: the time to its end


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """A worker that could run a prompt, as a placement sees it."""

    name: str
    wait_s: float  # predicted, until it begins with this prompt
    prompt_s: float  # predicted, for what it has to compute and copy of this prompt
    num_requests: int  # that it has
    held_tokens: int  # of memory that these will need
    cached_tokens: int  # of this prompt that need not be computed there


@dataclass(frozen=True, slots=True)
class LoadAhead:
    """The load that a new request finds, as an admission sees it."""

    first_token_s: float  # predicted, from now to its first token
    prompt_s: float  # the part of that which its own prompt takes
    num_open: int  # requests of all clients
    num_waiting: int  # requests of its class whose prompts have not begun, lines of batch jobs left out
    free_tokens: float | None  # of memory on the worker that would run it; None: not known
