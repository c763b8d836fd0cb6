"""OpenAI's own client, by its Responses API."""

from __future__ import annotations

import sys
import time
from typing import Any

import openai
from forms import PARAMETERS, Number, call, weather
from report import OTHER, raised
from tries import Report

url, model, question = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
report = Report("openai")
TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}


def ask(**more: Any) -> Any:
    return client.responses.create(**{"model": model, "input": question, "temperature": 0, **more})


@report.tries("chat")
def chat() -> str:
    return str(ask().output_text)


@report.tries("streaming")
def streaming() -> list[str]:
    with client.responses.stream(model=model, input=question, temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(pieces)
    return pieces


@report.tries("a tool and the answer to it")
def tool() -> dict[str, Any]:
    first = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (asked,) = first.output
    city = call(asked.name, asked.arguments)["arguments"]["city"]
    result: Any = {"type": "function_call_output", "call_id": asked.call_id, "output": weather(city)}
    free: Any = {"tools": [TOOL], "tool_choice": "none", "max_output_tokens": 32}  # so small a model may call again
    after = ask(input=[result], previous_response_id=first.id, **free)
    return {"asked": [city], "answer": after.output_text}


@report.tries("a streamed call of a tool")
def streamed_call() -> dict[str, Any]:
    with client.responses.stream(model=model, input=question, tools=[TOOL], tool_choice="required") as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        asked: Any = stream.get_final_response().output[0]
    assert asked.arguments in "".join(pieces)
    return call(asked.name, asked.arguments)


@report.tries("a JSON schema")
def schema() -> dict[str, Any]:
    parsed = client.responses.parse(model=model, input=question, text_format=Number).output_parsed
    return {} if parsed is None else parsed.model_dump()


@report.tries("a conversation that the server keeps")
def conversation() -> dict[str, Any]:
    first = ask()
    second = ask(input="And again?", previous_response_id=first.id)
    listed: Any = client.responses.input_items.list(second.id)
    assert client.responses.retrieve(first.id) == first
    assert second.usage.input_tokens > first.usage.total_tokens - 2
    client.responses.delete(first.id)
    assert raised(lambda: client.responses.retrieve(first.id))["status"] == 404
    return {"answer": second.output_text, "listed": [item.content[0].text for item in listed]}


@report.tries("a response in the background")
def background() -> dict[str, Any]:
    queued = ask(background=True)
    assert queued.status == "queued"
    while (stands := client.responses.retrieve(queued.id)).status in ("queued", "in_progress"):
        time.sleep(0.2)
    return {"status": stands.status, "answer": stands.output_text}


@report.tries("an unknown model")
def unknown() -> str:
    return str(ask(model=OTHER))


report.say()
