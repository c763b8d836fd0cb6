"""Anthropic's own client."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic
from forms import PARAMETERS, weather
from report import LONGER, OTHER
from tries import Report

url, model, question = sys.argv[1:]
client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
report = Report("anthropic")
GREEDY: Any = {"extra_body": {"temperature": 0}}  # the client has no field for it any more
TOOL: Any = {"name": "weather", "description": "Of a city", "input_schema": PARAMETERS}
SCHEMA: Any = {
    "type": "object",
    "properties": {"word": {"enum": ["odd", "even"]}},
    "required": ["word"],
    "additionalProperties": False,
}
ASKING: Any = [{"role": "user", "content": question}]


def ask(**more: Any) -> Any:
    return client.messages.create(**{"model": model, "max_tokens": 64, "messages": ASKING, **GREEDY, **more})


@report.tries("chat")
def chat() -> str:
    message = ask()
    assert message.stop_reason == "end_turn"
    return str(message.content[0].text)


@report.tries("streaming")
def streaming() -> list[str]:
    with client.messages.stream(model=model, max_tokens=64, messages=ASKING, **GREEDY) as stream:
        pieces = list(stream.text_stream)
        assert stream.get_final_message().stop_reason == "end_turn"
    return pieces


@report.tries("a tool and the answer to it")
def tool() -> dict[str, Any]:
    (asked,) = ask(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}).content
    result = {"type": "tool_result", "tool_use_id": asked.id, "content": weather(asked.input["city"])}
    turns = [*ASKING, {"role": "assistant", "content": [asked]}, {"role": "user", "content": [result]}]
    answer = ask(messages=turns, tools=[TOOL], tool_choice={"type": "none"})  # so small a model may call again
    return {"asked": [asked.input["city"]], "answer": answer.content[0].text}


@report.tries("a streamed call of a tool")
def streamed_call() -> dict[str, Any]:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=model, max_tokens=64, messages=ASKING, tools=[TOOL], tool_choice=choice
    ) as stream:
        asked: Any = stream.get_final_message().content[0]
    return {"name": asked.name, "arguments": asked.input}


@report.tries("a JSON schema")
def schema() -> dict[str, Any]:
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    return dict(json.loads(ask(output_config=form).content[0].text))


@report.tries("a system text")
def system() -> dict[str, str]:
    return {"answer": ask(system="Be brief.", metadata={"user_id": "u"}).content[0].text}


@report.tries("stop sequences")
def stopped() -> str:
    message = ask(stop_sequences=["4"])
    assert message.stop_reason == "stop_sequence"
    return str(message.stop_sequence)


@report.tries("counts of tokens")
def counted() -> int:
    usage = ask().usage
    count = client.messages.count_tokens(model=model, messages=ASKING).input_tokens
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count
    return count


@report.tries("models")
def models() -> list[str]:
    return [listed.display_name for listed in client.models.list() if listed.type == "model"]


@report.tries("an unknown model")
def unknown() -> Any:
    return ask(model=OTHER).id


@report.tries("a prompt that is too long")
def too_long() -> Any:
    return ask(messages=[{"role": "user", "content": question * LONGER}]).id


report.say()
