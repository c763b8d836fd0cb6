"""Anthropic's own client."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic
from forms import PARAMETERS, call
from report import LONGER, OTHER, raised

url, model, question = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
GREEDY: Any = {"extra_body": {"temperature": 0}}  # the client has no field for it any more
TOOL: Any = {"name": "weather", "description": "Of a city", "input_schema": PARAMETERS}


def ask(**more: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    return client.messages.create(**{"model": model, "max_tokens": 64, "messages": messages, **GREEDY, **more})


def streamed() -> dict[str, Any]:
    messages: Any = [{"role": "user", "content": question}]
    with client.messages.stream(model=model, max_tokens=64, messages=messages, **GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    return {
        "text": "".join(pieces),
        "pieces": len(pieces),
        "stop": final.stop_reason,
        "tokens": final.usage.output_tokens,
    }


def streamed_call() -> dict[str, Any]:
    messages: Any = [{"role": "user", "content": question}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=model, max_tokens=64, messages=messages, tools=[TOOL], tool_choice=choice
    ) as stream:
        (asked,) = stream.get_final_message().content
    return call(asked.name, asked.input)


def called() -> dict[str, Any]:
    (asked,) = ask(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}).content
    result = {"type": "tool_result", "tool_use_id": asked.id, "content": "It rains."}
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": [asked]}]
    after = ask(messages=[*turns, {"role": "user", "content": [result]}])
    assert after.content[0].type == "text"
    return call(asked.name, asked.input)


whole = ask(system="Be brief.", metadata={"user_id": "u"})
plain = ask()
print(
    json.dumps(
        {
            "version": anthropic.__version__,
            "system": whole.stop_reason,
            "text": plain.content[0].text,
            "stop": plain.stop_reason,
            "tokens": [
                plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0),
                plain.usage.output_tokens,
            ],
            "counted": client.messages.count_tokens(
                model=model, messages=[{"role": "user", "content": question}]
            ).input_tokens,
            "streamed": streamed(),
            "call": called(),
            "streamed_call": streamed_call(),
            "stopped": ask(stop_sequences=["4"]).stop_sequence,
            "models": [listed.id for listed in client.models.list()],
            "no_such_model": raised(lambda: ask(model=OTHER)),
            "too_long": raised(lambda: ask(messages=[{"role": "user", "content": question * LONGER}])),
        }
    )
)
