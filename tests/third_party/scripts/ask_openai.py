"""OpenAI's own client, of several majors."""

from __future__ import annotations

import sys
from typing import Any

import openai
from report import LONGER, OTHER, answer, raised, say

url, model, question = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def ask(model: str = model, question: str = question, **more: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=model, messages=messages, temperature=0, **more)


def told(text: str, finish: str | None, usage: Any) -> dict[str, Any]:
    return answer(text, finish, usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


whole = ask()
*chunks, last = ask(stream=True, stream_options={"include_usage": True})
pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
say(
    openai.__version__,
    whole=told(whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage),
    streamed=told("".join(pieces), chunks[-1].choices[0].finish_reason, last.usage),
    pieces=pieces,
    no_such_model=raised(lambda: ask(OTHER)),
    no_such_model_streamed=raised(lambda: list(ask(OTHER, stream=True))),
    too_long=raised(lambda: ask(question=question * LONGER)),
)
