"""Prompts as tokens and back, as vLLM's `/tokenize` and `/detokenize` have them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from alignedserve.gateway.openai.admission import CUT, check_length
from alignedserve.gateway.openai.errors import invalid
from alignedserve.gateway.openai.strict import ListOf, Strict
from alignedserve.gateway.openai.tools import MOST_TOOLS, Tool
from alignedserve.gateway.openai.types import MOST_MESSAGES, Message, TokenId
from alignedserve.text.chat_template import Rendering, all_texts
from alignedserve.text.text_model import TextModel


class TokenizeRequest(Strict):
    """A text, or a conversation as it would be a prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[Message] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    tools: ListOf[Tool] | None = Field(None, max_length=MOST_TOOLS)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_of_both", "there must be a prompt or messages", {"field": "prompt"})
        foreign = (
            ("add_special_tokens",) if self.messages else ("tools", "add_generation_prompt", "chat_template_kwargs")
        )
        for name in foreign:
            if getattr(self, name) is not None:
                message = f"not with {'messages' if self.messages else 'a prompt'}"
                raise PydanticCustomError("one_of_both", message, {"field": name})
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: ListOf[TokenId]


def tokenized(body: TokenizeRequest, text: TextModel, max_model_len: int) -> dict[str, Any]:
    texts = [*all_texts([body.prompt, [message.shown for message in body.messages or ()]])]
    check_length(texts, text, max_model_len, CUT * max_model_len, "messages" if body.messages else "prompt")
    ids = _ids(body, text)
    written = [text.token_bytes(token).decode("utf-8", "replace") for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": written}


def _ids(body: TokenizeRequest, text: TextModel) -> list[int]:
    if body.prompt is not None:
        return text.prompt_ids(body.prompt, body.add_special_tokens is not False)
    how = Rendering(
        tuple(tool.shown for tool in body.tools or ()),
        opens_answer=body.add_generation_prompt is not False,
        more=body.chat_template_kwargs or {},
    )
    return text.chat_ids([message.shown for message in body.messages or ()], how)


def detokenized(body: DetokenizeRequest, text: TextModel, _: int) -> dict[str, Any]:
    """Special tokens too: what `tokenized` has made of a text gives that text again."""
    if body.tokens and max(body.tokens) >= text.vocab_size:
        raise invalid(f"tokens: {max(body.tokens)} is no token of this model, which has {text.vocab_size}", "tokens")
    return {"prompt": text.decode_all(body.tokens)}
