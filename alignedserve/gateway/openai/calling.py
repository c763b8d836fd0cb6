"""The format and the grammar of the calls in an answer, which follow from the body and the model."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.core import Choice
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.formats import Format, Schema, WantedCalls
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.text.call_grammar import Beside
from alignedserve.text.calls.formats import CallFormat
from alignedserve.text.syntax_trial import OnTrial
from alignedserve.text.text_model import TextModel

_ANY_OBJECT: Schema = {"type": "object"}


def call_format(body: ChatRequest, text: TextModel) -> CallFormat:
    """Return the format in which an answer's calls are written."""
    own = None if body.format is None else body.format.call_format(text)
    return own or text.call_format


def limits(body: ChatRequest | CompletionRequest, text: TextModel, on_trial: OnTrial) -> tuple[Choice | None, str]:
    """Return what an output must follow, as lists of tokens or as a syntax; raise if nothing could follow it."""
    if body.format is not None:
        return body.format.limits(text, on_trial)
    if isinstance(body, ChatRequest) and body.is_held(text):
        return _held_to_calls(body.free_calls(Beside.TEXT), body.strict_functions, text, on_trial)
    return None, ""


def _held_to_calls(
    calls: WantedCalls, strict: frozenset[str], text: TextModel, on_trial: OnTrial
) -> tuple[Choice | None, str]:
    """Return the limits of free text with calls.

    If a schema cannot be followed, arguments are any objects but where their schema binds them."""
    functions = {name: schema if name in strict else _ANY_OBJECT for name, schema in calls.functions.items()}
    try:
        return Format("tools", calls=calls).limits(text, on_trial)
    except ApiError:
        return Format("tools", calls=replace(calls, functions=functions)).limits(text, on_trial)
