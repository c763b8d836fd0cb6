"""Convert prompts to tokens and back, with the interface of vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field
from pydantic_core import PydanticCustomError

from alignedserve.gateway.openai.requests import (
    MOST_CONTEXTS,
    chat_ids,
    check_length,
    check_texts,
    check_token_ids,
    too_long,
)
from alignedserve.gateway.openai.strict import ListOf, Ruled, Strict, fault
from alignedserve.gateway.openai.tools import MOST_TOOLS, Tool
from alignedserve.gateway.openai.types import MOST_MESSAGES, ChatMessage, TokenId
from alignedserve.text.chat_template import Rendering
from alignedserve.text.text_model import TextModel

# A body's tokens need not fit into the context. MOST_CONTEXTS of a long one would take a thread for ten seconds:
# they are no more than this, or one context.
MOST_CONVERTED = 1 << 18


class TokenizeRequest(Ruled):
    """The body of /tokenize: a text, or a conversation that is rendered as a prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[ChatMessage] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    tools: ListOf[Tool] | None = Field(None, max_length=MOST_TOOLS)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def faults(self) -> Iterator[PydanticCustomError]:
        if (self.prompt is None) == (self.messages is None):
            yield fault("prompt", "there must be either a prompt or messages")
        foreign = (
            ("add_special_tokens",) if self.messages else ("tools", "add_generation_prompt", "chat_template_kwargs")
        )
        for name in foreign:
            if getattr(self, name) is not None:
                yield fault(name, f"cannot be used with {'messages' if self.messages else 'a prompt'}")


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: ListOf[TokenId]


def tokenize(body: TokenizeRequest, text: TextModel, max_model_len: int) -> tuple[dict[str, Any], int]:
    """Return the answer of /tokenize, and the number of tokens."""
    rendering = _rendering(body)
    most = _most_tokens(max_model_len)
    if body.prompt is not None:
        check_length([body.prompt], text, max_model_len, most, "prompt")
        ids = text.prompt_ids(body.prompt, body.add_special_tokens is not False)
    else:
        messages = [message.shown for message in body.messages or ()]
        check_texts(text, [messages, rendering.tools, rendering.more], max_model_len, most)
        ids = chat_ids(text, messages, rendering, max_model_len, most)
    written = [text.token_bytes(token).decode("utf-8", "replace") for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": written}, len(ids)


def _most_tokens(max_model_len: int) -> int:
    return min(MOST_CONTEXTS * max_model_len, max(max_model_len, MOST_CONVERTED))


def _rendering(body: TokenizeRequest) -> Rendering:
    return Rendering(
        tuple(tool.shown for tool in body.tools or ()),
        opens_answer=body.add_generation_prompt is not False,
        more=body.chat_template_kwargs or {},
    )


def detokenize(body: DetokenizeRequest, text: TextModel, max_model_len: int) -> tuple[dict[str, Any], int]:
    """Return the answer of /detokenize, and the number of tokens. It is the tokens' text with its special tokens, so
    that it reverses `tokenize`."""
    if len(body.tokens) > (most := _most_tokens(max_model_len)):
        fault = f"there are {len(body.tokens)} tokens, and {most} are the most: send them in parts"
        raise too_long(fault, max_model_len, "tokens")
    check_token_ids("tokens", body.tokens, text.vocab_size)
    return {"prompt": text.decode_all(body.tokens)}, len(body.tokens)
