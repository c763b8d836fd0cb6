"""Build a response from the pieces of its answer, and the events of its stream.

    created ─▶ in_progress ─▶ item added ─▶ part added ─▶ deltas ─▶ part done ─▶ item done ─▶ ... ─▶ completed
                                                                                                   or incomplete

Events are numbered from 0, and a client that saw the number N can ask for those after it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from alignedserve.config.prices import NOTHING_CHARGED
from alignedserve.core import FinishReason, Request
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.itemised import Event, ItemAnswer, Keep, Kind, OpenItem
from alignedserve.gateway.openai.reading import AnswerPiece, cost_of
from alignedserve.gateway.openai.shapes import TokenNames, chat_logprobs
from alignedserve.gateway.openai.writing import encoded
from alignedserve.gateway.responses.types import ResponseRequest, call_id, output_id
from alignedserve.text.calls.scanning import CallPart
from alignedserve.text.text_model import TextModel


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


@dataclass(frozen=True)
class _TextForm:
    """The place of a text in its item, and the names of its events."""

    field: str
    text: str  # events of the text begin so
    part: str = ""  # events of the only part begin so, which has the text
    kind: str = ""  # of the part


_MESSAGE = _TextForm("content", "response.output_text", "response.content_part", "output_text")
_REASONING = _TextForm("content", "response.reasoning_text", "response.content_part", "reasoning_text")
_SUMMARY = _TextForm("summary", "response.reasoning_summary_text", "response.reasoning_summary_part", "summary_text")
_ARGUMENTS = _TextForm("arguments", "response.function_call_arguments")


class ResponseAnswer(ItemAnswer):
    """Builds one response from its head to its last event."""

    def __init__(
        self, body: ResponseRequest, head: dict[str, Any], request: Request, text: TextModel, keep: Keep | None = None
    ) -> None:
        super().__init__(head, keep)
        reasoning = _REASONING if head["reasoning"]["summary"] is None else _SUMMARY
        self._forms: dict[Kind, _TextForm] = {"text": _MESSAGE, "reasoning": reasoning, "call": _ARGUMENTS}
        self._with_logprobs, self._names = body.shows_logprobs, TokenNames(text.token_bytes, by_ids=False)
        self._sampling = request.sampling
        self._input_tokens = len(request.prompt)
        self._cached_tokens = self._output_tokens = self._reasoning_tokens = 0
        self._charged = NOTHING_CHARGED
        self._held: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is not there yet
        self._logprobs: list[msgspec.Raw] = []  # of the open message
        self._shown_logprobs: list[msgspec.Raw] = []  # the same, as events show them
        self._at: dict[str, Any] = {}  # the place of the open item's text
        self._num_events = 0

    def begin(self) -> list[Event]:
        self.tree |= {"temperature": self._sampling.temperature, "top_p": self._sampling.top_p}
        self._tell("response.created", response=dict(self.tree))
        self.tree["status"] = "in_progress"
        self._tell("response.in_progress", response=dict(self.tree))
        return self._take()

    def feed(self, piece: AnswerPiece) -> list[Event]:
        self._output_tokens += len(piece.tokens)
        self._cached_tokens += piece.num_cached
        self._charged = piece.charged
        self._reasoning_tokens += piece.num_reasoning
        if self._with_logprobs:  # the events of a reasoning have no place for them
            logprobs = list(chat_logprobs(piece.tokens, piece.logprobs, self._names))
            self._held += logprobs[piece.num_reasoning :]
        self._read(piece)
        if piece.finish:
            self._end(piece.finish)
        return self._take()

    def _end(self, finish: FinishReason) -> None:
        status = "incomplete" if finish is FinishReason.LENGTH else "completed"
        if not self._num_items:
            self._begin("text")
        self._close(status)
        self.tree |= {"usage": self._usage, "status": status}
        if status == "completed":
            self.tree["completed_at"] = int(time.time())
        else:
            self.tree["incomplete_details"] = {"reason": "max_output_tokens"}
        self._tell(f"response.{status}", response=self.tree)

    def fail(self, error: ApiError) -> list[Event]:
        fail(self.tree, error)
        self._tell("response.failed", response=self.tree)
        return self._take()

    def whole(self, piece: AnswerPiece) -> dict[str, Any]:
        """Return the response of an answer that is one piece."""
        self.begin()
        self.feed(piece)
        return self.tree

    @property
    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._input_tokens,
            "input_tokens_details": {"cached_tokens": self._cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": self._input_tokens + self._output_tokens,
            **cost_of([self._charged]),
        }

    # --- Items

    def _make(self, kind: Kind, number: int, part: CallPart | None) -> dict[str, Any]:
        fields: dict[str, Any]
        if part is not None:
            type, id = "function_call", call_id(self.tree["id"], number)
            fields = {"call_id": id, "name": part.name, "arguments": ""}
        elif kind == "reasoning":
            type, fields = "reasoning", {"summary": []}
        else:
            type, fields = "message", {"role": "assistant", "content": []}
            self._logprobs, self._shown_logprobs = [], []
        tree = {"id": output_id(self.tree["id"], type, number), "type": type, "status": "in_progress", **fields}
        self._tell("response.output_item.added", output_index=number, item=dict(tree))
        self._at = {"item_id": tree["id"], "output_index": number}
        if part is None:
            self._at[f"{self._forms[kind].field}_index"] = 0
            self._tell(f"{self._forms[kind].part}.added", **self._at, part=self._part(kind, ""))
        return tree

    def _tell_delta(self, item: OpenItem, text: str) -> None:
        more: dict[str, Any] = {}
        if item.kind == "text":
            more = {"logprobs": [_without_bytes(entry) for entry in self._held]}
            self._logprobs += encoded(self._held)
            self._shown_logprobs += encoded(more["logprobs"])
            self._held = []
        self._tell(f"{self._forms[item.kind].text}.delta", **self._at, delta=text, **more)

    def _tell_end(self, item: OpenItem, status: str) -> None:
        form = self._forms[item.kind]
        if item.kind == "call":
            item.tree["arguments"] = item.text
            self._tell(f"{form.text}.done", **self._at, name=item.tree["name"], arguments=item.text)
        else:
            part = self._part(item.kind, item.text)
            item.tree[form.field] = [part]
            more = {"logprobs": self._shown_logprobs} if item.kind == "text" else {}
            self._tell(f"{form.text}.done", **self._at, text=item.text, **more)
            self._tell(f"{form.part}.done", **self._at, part=part)
        item.tree["status"] = status
        self.tree["output"] = [*self.tree["output"], item.tree]
        self._tell("response.output_item.done", output_index=item.number, item=item.tree)

    def _part(self, kind: Kind, text: str) -> dict[str, Any]:
        more = {"annotations": [], "logprobs": list(self._logprobs)} if kind == "text" else {}
        return {"type": self._forms[kind].kind, "text": text, **more}

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1


def fail(tree: dict[str, Any], error: ApiError) -> None:
    """Make a response one that this error has ended."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error" if error.status >= 500 else "invalid_prompt"
    tree |= {"status": "failed", "error": {"code": code, "message": error.message}}


def _without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a token's log-probability as events show it."""
    top = [{"token": other["token"], "logprob": other["logprob"]} for other in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}
