"""Haystack: its chat generators for OpenAI's API in pipelines, and its agent."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from forms import Number, weather
from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import tool as as_tool
from haystack.utils import Secret
from report import OTHER
from tries import Report

url, model, question = sys.argv[1:]
report = Report("haystack-ai")
asked: list[str] = []
ASKING = [ChatMessage.from_user(question)]
SERVED: Any = {"api_base_url": url, "api_key": Secret.from_token("none"), "max_retries": 0}


def generator(kind: Any = OpenAIChatGenerator, model: str = model, more: Any = None, **settings: Any) -> Any:
    kept = {"temperature": 0, **(more or {})}
    return kind(model=model, generation_kwargs=kept, **SERVED, **settings)


@as_tool
def weather_of(city: Annotated[Literal["Rome", "Oslo"], "the city"]) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return weather(city)


@report.tries("chat")
def chat() -> str:
    pipeline = Pipeline()
    pipeline.add_component("prompt", ChatPromptBuilder(template=[ChatMessage.from_user("{{ question }}")]))
    pipeline.add_component("model", generator())
    pipeline.connect("prompt.prompt", "model.messages")
    return str(pipeline.run({"prompt": {"question": question}})["model"]["replies"][0].text)


@report.tries("streaming")
def streaming() -> list[str]:
    chunks: list[StreamingChunk] = []
    generator(streaming_callback=chunks.append).run(ASKING)
    return [chunk.content for chunk in chunks if chunk.content]


@report.tries("a tool and the answer to it")
def tool() -> dict[str, Any]:
    forced = generator(more={"tool_choice": "required", "max_tokens": 64})
    called = Agent(chat_generator=forced, tools=[weather_of], exit_conditions=["weather_of"]).run(ASKING)["messages"]
    told = generator(more={"tool_choice": "none", "max_tokens": 64})  # a small model would call again
    answer = told.run(called, tools=[weather_of])["replies"][0]
    return {"asked": asked[:1], "answer": answer.text}


@report.tries("a tool with auto")
def streamed_tool() -> dict[str, Any]:
    free = generator(more={"max_tokens": 64}, streaming_callback=[].append)
    return {"answer": Agent(chat_generator=free, tools=[weather_of]).run(ASKING)["last_message"].text}


@report.tries("a JSON schema")
def schema() -> dict[str, Any]:
    shaped = generator(more={"response_format": Number, "max_tokens": 64})
    return Number.model_validate_json(shaped.run(ASKING)["replies"][0].text).model_dump()


@report.tries("a name in a message")
def named() -> str:
    return str(generator().run([ChatMessage.from_user(question, name="mia")])["replies"][0].text)


@report.tries("chat by the Responses API")
def responses() -> str:
    return str(generator(OpenAIResponsesChatGenerator).run(ASKING)["replies"][0].text)


@report.tries("a tool by the Responses API")
def tool_by_responses() -> dict[str, Any]:
    asked.clear()
    forced = generator(OpenAIResponsesChatGenerator, more={"tool_choice": "required", "max_output_tokens": 128})
    called = Agent(chat_generator=forced, tools=[weather_of], exit_conditions=["weather_of"]).run(ASKING)["messages"]
    free = generator(OpenAIResponsesChatGenerator, more={"max_output_tokens": 64})
    return {"asked": asked[:1], "answer": free.run(called, tools=[weather_of])["replies"][0].text}


@report.tries("an unknown model")
def unknown() -> Any:
    return generator(model=OTHER).run(ASKING)


report.say()
