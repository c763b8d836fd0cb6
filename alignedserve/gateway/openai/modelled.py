"""What follows from a body and its model together: the format and grammar of calls, where reasoning begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alignedserve.core import Choice, Reasoning
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.formats import Format, Schema, WantedCalls
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.text.call_grammar import BesideCalls
from alignedserve.text.calls.formats import CallFormat
from alignedserve.text.reasoning.families import ReasoningFamily
from alignedserve.text.reasoning.splitting import Splitter
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
        return _held_to_calls(body.free_calls(BesideCalls.TEXT), body.strict_functions, text, on_trial)
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


_LAST = 32  # tokens of a prompt that show whether it ends within a reasoning


def limited_reasoning(
    body: ChatRequest | CompletionRequest, prompt: Sequence[int], text: TextModel, has_form: bool
) -> Reasoning | None:
    """Return the reasoning as the engine must know it; None if nothing limits it or the answer's form."""
    if not isinstance(body, ChatRequest) or text.reasoning is None:
        return None
    if not has_form and body.most_reasoning_tokens is None:
        return None
    family, inside = text.reasoning, _begins_inside(body, prompt, text, text.reasoning)
    return Reasoning(
        family.name,
        inside,
        () if inside else tuple(text.answer_ids(family.starts[0])),
        tuple(text.answer_ids(family.closing)),
        body.most_reasoning_tokens,
        _may_call(body),
    )


def make_splitter(body: ChatRequest, prompt: Sequence[int], text: TextModel) -> Splitter | None:
    """Return what parts an answer into reasoning and text; None if the model does not reason."""
    if text.reasoning is None:
        return None
    family, hides = text.reasoning, body.skip_special_tokens is not False
    hidden = text.special_markers(family.markers) if hides else ()
    return family.make_splitter(_begins_inside(body, prompt, text, family), _may_call(body), hidden)


def markers_of_reasoning(body: ChatRequest, text: TextModel) -> frozenset[str]:
    """Return the texts that the splitter must see, even if they are special tokens."""
    if text.reasoning is None:
        return frozenset()
    return text.reasoning.markers | (frozenset(text.reasoning.calls) if _may_call(body) else frozenset())


def _begins_inside(body: ChatRequest, prompt: Sequence[int], text: TextModel, family: ReasoningFamily) -> bool:
    if not body.continue_final_message:
        return family.begins_inside(text.decode_all(prompt[-_LAST:]))
    said = body.messages[-1].text
    begun, ended = (max(map(said.rfind, markers)) for markers in (family.starts, family.ends))
    return begun > ended


def _may_call(body: ChatRequest) -> bool:
    return body.may_call and body.demanded_calls is None
