"""The places where a poisonous request can strike, and the ways: a kind of poison is a place and a way.

A request is recognised by its marks, wherever they stand in what a function is given: its seed and its id, the name of
its adapter, two tokens of its prompt that no other has, or, in a gateway, the task that answers it. So all places but
those with a `when` need only name a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from alignedserve.executor.work_watch import ON_GPU_S

WAYS = (
    *("SIGKILL", "error", "exit 0", "MemoryError", "SIGSEGV", "RecursionError"),
    *("panic", "sleeps", "keeps the lock"),  # a panic is no Exception: so Rust's libraries end
)
HANGS = ("sleeps", "keeps the lock")
SEEN = "is seen"  # a way that does nothing: it tells whether a request comes to a place at all
TOKENS = 12  # of a poisonous request's output
LORA = "poisonous"  # the adapter that no other request has

_COLOCATED, _PARTED = ("colocated", "2xcolocated"), ("1+1", "2+2")
ALL = (*_COLOCATED, *_PARTED)
DIRECT = ("2+2",)  # where KV goes from worker to worker beside the pool


@dataclass(frozen=True)
class Place:
    name: str
    at: str  # module:function, or module:Class.method
    body: str = "tokens"  # which request comes here: trial.py has them
    topologies: tuple[str, ...] = ALL
    when: Callable[..., Iterable[Any]] | None = None  # what is searched for marks, of what the function is given
    ends: str = "worker"  # the part that ends with it
    limit_s: float = 0.0  # after which a part is ended that hangs here, where that takes long


def _parts(holds: Callable[[Any], bool]) -> Callable[..., Iterator[str]]:
    """Search the requests of a step for which this holds."""
    return lambda _, plan: (part.request for part in plan.parts if holds(part))


def _is_later_chunk(part: Any) -> bool:
    return part.start > 0 and hasattr(part, "tokens")


def _told(*kinds: str, core: str = "") -> Callable[..., Iterator[Any]]:
    """Search the events, and messages of other parts, of these kinds."""

    def found(self: Any, event: Any, _now: float) -> Iterator[Any]:
        said = getattr(event, "message", event)
        if type(said).__name__ in kinds and core in ("", type(self).__name__):
            yield said

    return found


def _of_index(first: int, last: int) -> Callable[..., Iterator[str]]:
    """Search the decodes of these tokens of an output; one after a death may be the end of a prompt."""
    return _parts(lambda part: part.sampling is not None and first <= part.index <= last)


def _wanted(_: Any, _logits: Any, wanted: Any) -> Iterable[Any]:
    return (wanted,)


def _placed(_core: Any, opened: Any, _to: Any, fact: Any, *_: Any) -> Iterable[Any]:
    return (opened.request,) if fact.name == "PLACED" else ()


def _running(running: Any, *_: Any) -> Iterable[Any]:
    return (running.request,)


def _requests(requests: Any, *_: Any) -> Iterable[Any]:
    return (running.request for running in requests)


def _core(name: str, at: str, ends: str, kinds: str, topologies: tuple[str, ...] = ALL, body: str = "tokens") -> Place:
    return Place(name, at, body, topologies, _told(*kinds.split()), ends)


_G, _E, _W = "alignedserve.gateway", "alignedserve.engine", "alignedserve.decode_worker"
_ROUTER, _POOL = "alignedserve.router.state:RouterCore.handle", "alignedserve.kvpool.state:PoolCore.handle"
_OWNER = "alignedserve.owner.core:OwnerCore.handle"
_DECODE = "alignedserve.decode_worker.state:DecodeCore.hear"  # a worker hears a step's end on its own, then acts
_REWRITING = "alignedserve.kvpool.memory.compression:Rewriting"

PLACES = (
    # A gateway, before the request has an id, and as its answer comes
    Place("body", f"{_G}.starting:parse_body", "chat", ends="gateway"),
    Place("template", "alignedserve.text.text_model:TextModel.chat_ids", "chat", ends="gateway"),
    Place("tokeniser", "alignedserve.text.text_model:TextModel.prompt_ids", "text", ends="gateway"),
    Place("making", f"{_G}.starting:make_requests", ends="gateway"),
    Place("sketch", "alignedserve.owner.shell:Owner._sketch", ends="gateway"),
    Place("reader", f"{_G}.openai.reading:AnswerReader.read", "chat", ends="gateway"),
    Place("detokeniser", "alignedserve.text.decoding:IncrementalDecoder.feed", "stream", ends="gateway"),
    Place("stop text", "alignedserve.text.decoding:StopStrings.feed", "stop", ends="gateway"),
    Place("call parser", "alignedserve.text.calls.scanning:CallReader.feed", "tools", ends="gateway"),
    Place("log-probabilities", f"{_G}.openai.shapes:CompletionLogprobs.table", "logprobs", ends="gateway"),
    Place("chunk", f"{_G}.openai.shapes:AnswerShape.chunk", "stream", ends="gateway"),
    Place("whole answer", f"{_G}.openai.shapes:AnswerShape.whole", ends="gateway"),
    Place("meter", f"{_G}.http.records:BodyMeter.count_delivery", ends="gateway"),
    Place("grammar trial", "alignedserve.text.syntax_trial:SyntaxTrial.find_fault", "grammar", ends="gateway"),
    # A worker's steps
    Place("first chunk", f"{_E}.engine:Engine.begin", "long", when=_parts(lambda part: part.start == 0)),
    Place("later chunk", f"{_E}.engine:Engine.begin", "long", when=_parts(_is_later_chunk)),
    Place("first decode", f"{_E}.engine:Engine.begin", when=_of_index(1, 1)),
    Place("sixth decode on", f"{_E}.engine:Engine.begin", when=_of_index(6, TOKENS)),
    Place("last decode", f"{_E}.engine:Engine.begin", when=_of_index(TOKENS - 1, TOKENS)),
    Place("sampling", f"{_E}.sampling.sampling:Sampler.draw", when=_wanted),
    Place("step result", f"{_E}.engine:result_of", when=lambda plan, *_: (plan.parts,)),
    Place("grammar compile", "alignedserve.text.syntax:Syntaxes.prepare", "grammar"),
    Place("grammar mask", f"{_E}.sampling.sampling:Sampler._update_edits", "grammar"),
    Place("adapter in a step", f"{_E}.adapters.kept:KeptAdapters.step", "adapter"),
    Place("copy to the pool", f"{_E}.copying.copies:PageCopier.pages_out", "flex", _PARTED, limit_s=ON_GPU_S),
    Place("copy from the pool", f"{_E}.copying.copies:PageCopier.pages_in", "flex", _PARTED),
    Place("sending KV", "alignedserve.transport.ends:Sender._perform", "flex", DIRECT),
    Place("receiving KV", "alignedserve.transport.ends:Receiver._perform", "flex", DIRECT),
    # Links
    Place("frame out", "alignedserve.shell.links:encode", when=lambda envelope: (envelope.message,)),
    Place("frame in", "alignedserve.shell.links:decode", when=lambda frame, _: (frame,) if b"Submit" in frame else ()),
    # Cores: the event that declares the request, and later ones, which may be about many
    _core("router: Submit", _ROUTER, "router", "Submit"),
    _core("router: Progress", _ROUTER, "router", "Progress"),
    _core("router: Cancel", _ROUTER, "router", "Cancel", body="leaves"),
    Place("router: placing", "alignedserve.router.state:RouterCore._move", ends="router", when=_placed),
    Place("router: predicting", "alignedserve.router.lengths:OutputLengths.opened", ends="router"),
    _core("worker: Prefill", _DECODE, "worker", "Prefill"),
    _core("worker: StepDone", _DECODE, "worker", "StepDone"),
    _core("worker: Batch", _DECODE, "worker", "Batch Offer", _PARTED, "flex"),
    _core("worker: Acknowledge", _DECODE, "worker", "Acknowledge"),
    Place("worker: a chunk's plan", "alignedserve.worker.step.step_builder:chunk_of", when=_running),
    Place("worker: a decode's plan", f"{_W}.running:decodes_of", when=_requests),
    Place("worker: its end", f"{_W}.running:StepEnd._end", when=lambda _, running, *__: (running.request,)),
    _core("pool: AskPrefix", _POOL, "pool", "AskPrefix", _PARTED),
    _core("pool: Commit", _POOL, "pool", "Commit", _PARTED, "flex"),
    _core("pool: Release", _POOL, "pool", "Release", _PARTED, "flex"),
    Place("pool: handing out", f"{_REWRITING}.waits_no_longer", "flex", _PARTED, ends="pool"),
    _core("owner: Opened", _OWNER, "gateway", "Opened"),
    _core("owner: Tokens", _OWNER, "gateway", "Tokens"),
    Place("owner: its end", "alignedserve.owner.core:OwnerCore._ended", ends="gateway"),
    # The job runner
    Place("line", "alignedserve.jobs.actor:read_checked_line", "line", ends="jobs"),
    Place("line's requests", "alignedserve.jobs.answering:Answering._read", "line", ends="jobs"),
    Place("line's result", "alignedserve.jobs.actor:answered_line", "line", ends="jobs"),
    _core("line's owner: Tokens", _OWNER, "jobs", "Tokens", body="line"),
)  # fmt: skip
BY_NAME = {place.name: place for place in PLACES}
