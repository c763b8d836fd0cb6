"""The reasoning before the answer to a chat: where it begins, and what limits it."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.core import Reasoning
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.text.reasoning.families import Family
from alignedserve.text.reasoning.splitting import Splitter
from alignedserve.text.text_model import TextModel

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


def _begins_inside(body: ChatRequest, prompt: Sequence[int], text: TextModel, family: Family) -> bool:
    if not body.continue_final_message:
        return family.begins_inside(text.decode_all(prompt[-_LAST:]))
    said = body.messages[-1].text
    begun, ended = (max(map(said.rfind, markers)) for markers in (family.starts, family.ends))
    return begun > ended


def _may_call(body: ChatRequest) -> bool:
    return body.may_call and body.demanded_calls is None
