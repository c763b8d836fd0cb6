"""LangChain's chat model over OpenAI's API."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from forms import PARAMETERS, SCHEMA, TOOL, call
from langchain_openai import ChatOpenAI
from report import LONGER, OTHER, answer, raised, say

url, model, question = sys.argv[1:]


def chat(model: str = model) -> Any:
    return ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, stream_usage=True)


def told(message: Any) -> dict[str, Any]:
    usage = message.usage_metadata
    tokens = usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]
    return answer(message.text, message.response_metadata["finish_reason"], *tokens)


def called(message: Any) -> dict[str, Any]:
    (asked,) = message.tool_calls
    assert set(asked["args"]) == set(PARAMETERS["properties"])
    return call(asked["name"], asked["args"])


caller = chat().bind_tools([TOOL], tool_choice="weather", parallel_tool_calls=False)
parts = list(caller.stream(question))
chunks = list(chat().stream(question))
say(
    version("langchain-openai"),
    whole=told(chat().invoke(question)),
    streamed=told(sum(chunks[1:], start=chunks[0])),
    pieces=[chunk.text for chunk in chunks],
    schema=chat().with_structured_output({"title": "number", **SCHEMA}, method="json_schema").invoke(question),
    call=called(caller.invoke(question)),
    streamed_call=called(sum(parts[1:], start=parts[0])),
    no_such_model=raised(lambda: chat(OTHER).invoke(question)),
    no_such_model_streamed=raised(lambda: list(chat(OTHER).stream(question))),
    too_long=raised(lambda: chat().invoke(question * LONGER)),
)
