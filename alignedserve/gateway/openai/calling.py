"""The format and the grammar of the calls in an answer, which follow from the body and the model."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.core import Choice
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.formats import Format, Schema, WantedCalls
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.text.call_grammar import Beside
from alignedserve.text.calls.formats import CallFormat
from alignedserve.text.text_model import TextModel

_ANY_OBJECT: Schema = {"type": "object"}


def call_format(body: ChatRequest, text: TextModel) -> CallFormat:
    """Return the format in which an answer's calls are written."""
    own = None if body.format is None else body.format.call_format(text)
    return own or text.call_format


def limits(body: ChatRequest | CompletionRequest, text: TextModel) -> tuple[Choice | None, str]:
    """Return what an output must follow, as lists of tokens or as a syntax; raise if nothing could follow it.

    A model that was never shown how to call tools is held to the format once it begins a call."""
    if body.format is not None:
        return body.format.limits(text)
    if isinstance(body, ChatRequest) and body.may_call and not text.shows_tools and _may_be_held(body):
        return _held_to_calls(body.free_calls(Beside.TEXT), text)
    return None, ""


def _may_be_held(body: ChatRequest) -> bool:
    """Return whether an output may follow a grammar: its end must be free."""
    return not (body.ignore_eos or body.min_tokens or body.allowed_token_ids)


def _held_to_calls(calls: WantedCalls, text: TextModel) -> tuple[Choice | None, str]:
    """Return the limits of free text with calls; arguments are any objects if a schema cannot be followed."""
    if calls.form(text, None) is not text.call_format:
        return None, ""  # its calls have no mark of their own
    loose = replace(calls, functions=dict.fromkeys(calls.functions, _ANY_OBJECT))
    try:
        return Format("tools", calls=calls).limits(text)
    except ApiError:
        return Format("tools", calls=loose).limits(text)
