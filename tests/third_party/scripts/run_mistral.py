"""Mistral's own client: chats, and the middle of a text."""

from __future__ import annotations

import json
import sys
from typing import Any

from forms import FORMAT, TOOL, call
from mistralai.client import Mistral
from report import OTHER
from tries import Report

url, model, question = sys.argv[1:]
report = Report("mistralai")
client = Mistral(api_key="none", server_url=url.removesuffix("/v1"))
ASKING: Any = [{"role": "user", "content": question}]
MIDDLE: Any = {"prompt": "def add(a, b):\n    return ", "suffix": "\n\nprint(add(1, 2))\n", "max_tokens": 32}


def ask(model: str = model, **more: Any) -> Any:
    return client.chat.complete(model=model, messages=ASKING, temperature=0, random_seed=1, **more)


@report.tries("chat")
def chat() -> str:
    return str(ask().choices[0].message.content)


@report.tries("streaming")
def streaming() -> list[str]:
    with client.chat.stream(model=model, messages=ASKING, temperature=0) as events:
        return [piece for event in events if (piece := event.data.choices[0].delta.content)]


@report.tries("a demanded call")
def tool() -> dict[str, Any]:
    answer = ask(tools=[TOOL], tool_choice="any", parallel_tool_calls=False)
    (called,) = answer.choices[0].message.tool_calls
    return call(called.function.name, called.function.arguments)


@report.tries("a JSON schema")
def schema() -> dict[str, Any]:
    return dict(json.loads(ask(response_format=FORMAT).choices[0].message.content))


@report.tries("the middle of a text")
def middle() -> str:
    return str(client.fim.complete(model=model, temperature=0, **MIDDLE).choices[0].message.content)


@report.tries("the middle of a text (streamed)")
def streamed_middle() -> str:
    with client.fim.stream(model=model, temperature=0, **MIDDLE) as events:
        return "".join(event.data.choices[0].delta.content for event in events)


@report.tries("an unknown model")
def unknown() -> Any:
    return ask(OTHER)


report.say()
