"""The life of a request on a worker: one table of states and transitions, for both kinds of worker.

A request is in one state at a time. `WorkerRequest.becomes` changes the state, and raises `IllegalTransition` with the
request's story where the table has no such transition; the worker's list of requests (worker/requests.py) follows.
docs/reference/internals.md shows the table as a picture, which `diagram` draws.

For example, a prompt on a colocated worker: NEW, ASKING, WAITING, FETCHING, PROMPT, RESIDENT, KEPT, GONE.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class State(Enum):
    """The states, in the order in which a worker names requests to the router."""

    NEW = "new"  # made from a message; nowhere yet
    COMPILING = "compiling"  # the syntax is compiled before any step
    RESIDENT = "resident"  # decodes, or leaves: all tokens but the last have KV here
    PROMPT = "prompt"  # has blocks, and runs chunk by chunk
    JOINING = "joining"  # has blocks, to which the KV is copied from the pool
    FETCHING = "fetching"  # has blocks, to which the pool's pages of the beginning are copied
    WAITING = "waiting"  # for a seat; has no blocks
    ASKING = "asking"  # the pool is asked what it has of the prompt's beginning
    LEAVING = "leaving"  # the KV is copied to the pool, where the request goes on
    CANDIDATE = "candidate"  # waits for room here; the KV is in the pool or on a prefill worker
    RECEIVING = "receiving"  # has blocks; the KV comes from a prefill worker's device
    DEPARTING = "departing"  # has blocks; the KV goes to another worker, if that worker has room
    KEPT = "kept"  # has ended; has blocks until the answer is in the pool
    ABANDONED = "abandoned"  # not wanted any more, but a copy or a transfer still uses the blocks
    GONE = "gone"  # ended, handed on or dropped: nothing is left here

    __hash__ = object.__hash__  # Enum's own is in Python, and dozens are asked for in each step


_GONE = {State.GONE: "cancelled"}

# State -> the states that may follow, each with what brings the request there.
TRANSITIONS: Mapping[State, Mapping[State, str]] = MappingProxyType(
    {
        State.NEW: {
            State.COMPILING: "prompt with a syntax",
            State.ASKING: "prompt",
            State.WAITING: "prompt, nothing to ask",
            State.CANDIDATE: "batch or offer",
        },
        State.COMPILING: {State.ASKING: "compiled", State.WAITING: "compiled", **_GONE},
        State.ASKING: {State.WAITING: "answered, or no answer", **_GONE},
        State.WAITING: {State.FETCHING: "seated, pages known", State.PROMPT: "seated", **_GONE},
        State.FETCHING: {State.PROMPT: "copied", State.WAITING: "not intact", State.ABANDONED: "cancelled"},
        State.PROMPT: {
            State.RESIDENT: "first token",
            State.LEAVING: "preempted",
            State.WAITING: "gives way to other prompts",
            State.GONE: "ended or cancelled",
        },
        State.CANDIDATE: {
            State.JOINING: "room, KV in the pool",
            State.RECEIVING: "room, KV on a device",
            State.WAITING: "the KV was given up",
            **_GONE,
        },
        State.JOINING: {State.RESIDENT: "copied", State.ABANDONED: "cancelled", State.GONE: "not intact"},
        State.RECEIVING: {
            State.RESIDENT: "received",
            State.JOINING: "not intact, the pool has it too",
            State.WAITING: "not intact, recomputed",
            State.ABANDONED: "cancelled",
            State.GONE: "not intact",
        },
        State.RESIDENT: {
            State.LEAVING: "preempted",
            State.DEPARTING: "handed on, or memory will be short",
            State.KEPT: "ended",
            State.GONE: "ended or cancelled",
        },
        State.DEPARTING: {
            State.CANDIDATE: "sent",
            State.RESIDENT: "refused or failed",
            State.ABANDONED: "cancelled",
            State.GONE: "sent, and goes on there",
        },
        State.LEAVING: {State.WAITING: "no pages, or the pool was lost", State.GONE: "in the pool, or cancelled"},
        State.KEPT: {State.GONE: "answer in the pool"},
        State.ABANDONED: {State.GONE: "copy or transfer ended"},
        State.GONE: {},
    }
)


class IllegalTransition(Exception):
    """A worker took a request to a state that the table does not allow; the text tells the request's story."""

    def __init__(self, request: tuple[str, int], story: list[State], state: State) -> None:
        told = " -> ".join(past.name for past in story)
        super().__init__(f"request {request[0]}, attempt {request[1]}, cannot become {state.name}; its story: {told}")


def diagram() -> str:
    """Return the table as a Mermaid state diagram, without what only cancelled requests go through."""
    lines = ["stateDiagram-v2"]
    for before, after in TRANSITIONS.items():
        for state, why in after.items():
            if why != "cancelled" and before is not State.ABANDONED:
                start, end = ("[*]" if end in (State.NEW, State.GONE) else end.name for end in (before, state))
                lines.append(f"    {start} --> {end}: {why}")
    return "\n".join(lines)
