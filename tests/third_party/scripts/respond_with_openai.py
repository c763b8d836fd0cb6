"""OpenAI's own client, by its Responses API."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import openai
from forms import PARAMETERS, call
from pydantic import BaseModel
from report import OTHER, raised

url, model, question = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}


class Number(BaseModel):
    number: int
    word: Literal["odd", "even"]


def ask(**more: Any) -> Any:
    return client.responses.create(**{"model": model, "input": question, "temperature": 0, **more})


def streamed() -> dict[str, Any]:
    with client.responses.stream(model=model, input=question, temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    return {"text": final.output_text, "pieces": len(pieces), "joined": "".join(pieces)}


def called() -> dict[str, Any]:
    (asked,) = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).output
    return call(asked.name, asked.arguments)


def conversation() -> dict[str, Any]:
    first = ask()
    second = ask(input="And again?", previous_response_id=first.id)
    listed = [item.content[0].text for item in client.responses.input_items.list(second.id)]
    same = client.responses.retrieve(first.id) == first
    longer = second.usage.input_tokens > first.usage.total_tokens - 2
    client.responses.delete(first.id)
    return {
        "same": same,
        "listed": listed,
        "longer": longer,
        "gone": raised(lambda: client.responses.retrieve(first.id)),
    }


whole = ask()
print(
    json.dumps(
        {
            "version": openai.__version__,
            "text": whole.output_text,
            "usage": [whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens],
            "streamed": streamed(),
            "call": called(),
            "parsed": client.responses.parse(
                model=model, input=question, text_format=Number
            ).output_parsed.model_dump(),
            "conversation": conversation(),
            "no_such_model": raised(lambda: ask(model=OTHER)),
        }
    )
)
