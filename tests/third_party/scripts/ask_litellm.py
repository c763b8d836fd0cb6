"""LiteLLM, to which we are one more OpenAI-compatible provider."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it asks GitHub for prices while it is imported

import litellm
from forms import DEMANDED, FORMAT, TOOL, call
from report import LONGER, OTHER, answer, raised, say

litellm.suppress_debug_info = True  # otherwise it prints advice into our JSON
url, model, question = sys.argv[1:]


def ask(model: str = model, question: str = question, **more: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    return litellm.completion(f"openai/{model}", messages, api_base=url, api_key="none", temperature=0, **more)


def told(text: str, finish: str | None, usage: Any) -> dict[str, Any]:
    return answer(text, finish, usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


def whole_call() -> dict[str, Any]:
    (asked,) = ask(tools=[TOOL], tool_choice=DEMANDED).choices[0].message.tool_calls
    return call(asked.function.name, asked.function.arguments)


def streamed_call() -> dict[str, Any]:
    chunks = ask(tools=[TOOL], tool_choice=DEMANDED, stream=True)
    parts = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    return call(parts[0].function.name, "".join(part.function.arguments for part in parts))


whole = ask()
chunks = list(ask(stream=True, stream_options={"include_usage": True}))
pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
(finish,) = {choice.finish_reason for chunk in chunks for choice in chunk.choices} - {None}
(usage,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
say(
    version("litellm"),
    whole=told(whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage),
    streamed=told("".join(pieces), finish, usage),
    pieces=pieces,
    schema=json.loads(ask(response_format=FORMAT).choices[0].message.content),
    call=whole_call(),
    streamed_call=streamed_call(),
    no_such_model=raised(lambda: ask(OTHER)),
    no_such_model_streamed=raised(lambda: list(ask(OTHER, stream=True))),
    too_long=raised(lambda: ask(question=question * LONGER)),
)
