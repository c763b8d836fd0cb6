"""Build a response from the pieces of its answer, and the events of its stream.

    created ─▶ in_progress ─▶ item added ─▶ part added ─▶ deltas ─▶ part done ─▶ item done ─▶ ... ─▶ completed
                                                                                                   or incomplete

A response has one item open at a time: reasoning, a message, or a call. A piece that goes on with another item closes
the open one. Events are numbered from 0, and a client that saw the number N can ask for those after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from alignedserve.core import FinishReason, Request
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.reading import AnswerPiece
from alignedserve.gateway.openai.shapes import TokenNames, chat_logprobs
from alignedserve.gateway.responses.items import call_id, output_id
from alignedserve.gateway.responses.types import ResponseRequest
from alignedserve.text.calls.parts import CallPart
from alignedserve.text.text_model import TextModel

Event: TypeAlias = dict[str, Any]


def response_head(body: ResponseRequest, id: str, created_at: int, tier: str) -> dict[str, Any]:
    """Return a response without an output, with the fields of the body that asks for it."""
    text, reasoning, choice = body.text, body.reasoning, body.tool_choice
    form = text.format.shown if text is not None and text.format is not None else {"type": "text"}
    summary = None if reasoning is None else reasoning.summary or reasoning.generate_summary
    return {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": tier,
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": form, **({"verbosity": text.verbosity} if text is not None and text.verbosity else {})},
        "tool_choice": choice.model_dump() if choice is not None and not isinstance(choice, str) else choice or "auto",
        "tools": [tool.shown for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


@dataclass
class _Usage:
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def tree(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


@dataclass
class _OpenItem:
    """The item that pieces are added to, and what of it has been written."""

    tree: dict[str, Any]
    kind: str
    number: int  # its place in the output
    text: str = ""  # of its only part, or its arguments
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    shown_logprobs: list[dict[str, Any]] = field(default_factory=list)  # the same, as events show them

    @property
    def at(self) -> dict[str, Any]:
        return {"item_id": self.tree["id"], "output_index": self.number}


@dataclass(frozen=True)
class _ReasoningForm:
    """The place of a reasoning's text in its item, and the events that tell of it."""

    field: str
    kind: str  # of the part
    part_added: str
    delta: str
    done: str
    part_done: str
    index: str

    @property
    def at(self) -> dict[str, int]:
        return {self.index: 0}

    def part(self, text: str) -> dict[str, str]:
        return {"type": self.kind, "text": text}


_AS_CONTENT = _ReasoningForm(
    "content",
    "reasoning_text",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "content_index",
)
_AS_SUMMARY = _ReasoningForm(
    "summary",
    "summary_text",
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.done",
    "summary_index",
)


class ResponseAnswer:
    """Build one response from its head to its last event; `tree` holds the response so far."""

    def __init__(self, head: dict[str, Any], wants_summary: bool, with_logprobs: bool, text: TextModel) -> None:
        self.tree = head
        self._usage = _Usage()
        self._wants_summary, self._with_logprobs = wants_summary, with_logprobs
        self._names = TokenNames(text.token_bytes, by_ids=False)
        self._open: _OpenItem | None = None
        self._held: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is not there yet
        self._num_events = 0

    @classmethod
    def from_body(cls, body: ResponseRequest, head: dict[str, Any], text: TextModel) -> ResponseAnswer:
        wants_summary = body.reasoning is not None and body.reasoning.wants_summary
        return cls(head, wants_summary, body.shows_logprobs, text)

    def begin(self, request: Request) -> list[Event]:
        """Return the first events, when the request of the response is known."""
        self._usage.input_tokens = len(request.prompt)
        self.tree |= {"temperature": request.sampling.temperature, "top_p": request.sampling.top_p}
        created = self._event("response.created", response=dict(self.tree))
        self.tree["status"] = "in_progress"
        return [created, self._event("response.in_progress", response=dict(self.tree))]

    def feed(self, piece: AnswerPiece) -> list[Event]:
        """Return the events of a piece; its reasoning comes before its text, and its calls come last."""
        self._usage.output_tokens += len(piece.tokens)
        self._usage.cached_tokens += piece.num_cached
        self._usage.reasoning_tokens += piece.num_reasoning
        events: list[Event] = self._reasoning(piece.reasoning) if piece.reasoning else []
        logprobs = self._logprobs(piece)
        self._held += logprobs[piece.num_reasoning :]  # the events of a reasoning have no place for them
        if piece.text:
            logprobs, self._held = self._held, []
            events += self._text("message", piece.text, logprobs)
        for part in piece.calls:
            events += self._call(part)
        return events

    def end(self, finish: FinishReason | None, now: int) -> list[Event]:
        """Return the last events of a response whose answer has ended."""
        is_whole = finish is not FinishReason.LENGTH
        events = self._text("message", "", []) if not self.tree["output"] and self._open is None else []
        events += self._close("completed" if is_whole else "incomplete")
        self.tree |= {"usage": self._usage.tree, "status": "completed" if is_whole else "incomplete"}
        if is_whole:
            self.tree["completed_at"] = now
        else:
            self.tree["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._event(f"response.{self.tree['status']}", response=self.tree)]

    def fail(self, error: ApiError) -> list[Event]:
        """Return the last event of a response that an error ends."""
        fail(self.tree, error)
        return [self._event("response.failed", response=self.tree)]

    def whole(self, request: Request, piece: AnswerPiece, now: int) -> dict[str, Any]:
        """Return the response of an answer that is one piece."""
        self.begin(request)
        self.feed(piece)
        self.end(piece.finish, now)
        return self.tree

    # --- Items

    def _text(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]]) -> list[Event]:
        """Return the events of a new text of the open message, which begins with it if none is open."""
        events = [] if self._open is not None and self._open.kind == kind else self._begin_message()
        opened = self._open
        assert opened is not None
        shown = [_without_bytes(entry) for entry in logprobs]
        opened.text += text
        opened.logprobs += logprobs
        opened.shown_logprobs += shown
        if text:
            more = {"content_index": 0, "delta": text, "logprobs": shown}
            events.append(self._event("response.output_text.delta", **opened.at, **more))
        return events

    def _reasoning(self, text: str) -> list[Event]:
        """Return the events of a new text of the open reasoning; a client that wants a summary gets it as that."""
        form = self._form
        events: list[Event] = []
        if self._open is None or self._open.kind != "reasoning":
            events += self._close("completed") + self._add("reasoning", summary=[])
            assert self._open is not None
            events.append(self._event(form.part_added, **self._open.at, **form.at, part=form.part("")))
        assert self._open is not None
        self._open.text += text
        return [*events, self._event(form.delta, **self._open.at, **form.at, delta=text)]

    @property
    def _form(self) -> _ReasoningForm:
        return _AS_SUMMARY if self._wants_summary else _AS_CONTENT

    def _end_reasoning(self, opened: _OpenItem) -> list[Event]:
        form = self._form
        part = form.part(opened.text)
        opened.tree[form.field] = [part]
        at = {**opened.at, **form.at}
        return [self._event(form.done, **at, text=opened.text), self._event(form.part_done, **at, part=part)]

    def _begin_message(self) -> list[Event]:
        events = self._close("completed")
        events += self._add("message", role="assistant", content=[])
        assert self._open is not None
        part = _text_part("", [])
        return [*events, self._event("response.content_part.added", **self._open.at, content_index=0, part=part)]

    def _call(self, part: CallPart) -> list[Event]:
        events: list[Event] = []
        if part.id is not None:
            events += self._close("completed")
            id = call_id(self.tree["id"], len(self.tree["output"]))
            events += self._add("function_call", call_id=id, name=part.name, arguments="")
        opened = self._open
        assert opened is not None
        opened.text += part.arguments
        if part.arguments:
            events.append(self._event("response.function_call_arguments.delta", **opened.at, delta=part.arguments))
        return events

    def _add(self, kind: str, **fields: Any) -> list[Event]:
        number = len(self.tree["output"])
        tree = {"id": output_id(self.tree["id"], kind, number), "type": kind, "status": "in_progress", **fields}
        self._open = _OpenItem(tree, kind, number)
        return [self._event("response.output_item.added", output_index=number, item=dict(tree))]

    def _close(self, status: str) -> list[Event]:
        """Return the events that end the open item, if there is one."""
        opened, self._open = self._open, None
        if opened is None:
            return []
        if opened.kind == "message":
            part = _text_part(opened.text, opened.logprobs)
            opened.tree["content"] = [part]
            at = {**opened.at, "content_index": 0}
            events = [
                self._event("response.output_text.done", **at, text=opened.text, logprobs=opened.shown_logprobs),
                self._event("response.content_part.done", **at, part=part),
            ]
        elif opened.kind == "reasoning":
            events = self._end_reasoning(opened)
        else:
            opened.tree["arguments"] = opened.text
            said = {"name": opened.tree["name"], "arguments": opened.text}
            events = [self._event("response.function_call_arguments.done", **opened.at, **said)]
        opened.tree["status"] = status
        self.tree["output"] = [*self.tree["output"], opened.tree]
        return [*events, self._event("response.output_item.done", output_index=opened.number, item=opened.tree)]

    def _logprobs(self, piece: AnswerPiece) -> list[dict[str, Any]]:
        if not self._with_logprobs:
            return []
        return list(chat_logprobs(piece.tokens, piece.logprobs, self._names))

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event


def fail(tree: dict[str, Any], error: ApiError) -> None:
    """Make a response one that this error has ended."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error" if error.status >= 500 else "invalid_prompt"
    tree |= {"status": "failed", "error": {"code": code, "message": error.message}}


def _text_part(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a token's log-probability as events show it."""
    top = [{"token": other["token"], "logprob": other["logprob"]} for other in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}
