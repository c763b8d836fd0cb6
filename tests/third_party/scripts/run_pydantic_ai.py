"""pydantic-ai, by chat completions or by the Responses API."""

from __future__ import annotations

import sys
from typing import Any, Literal

from forms import Loose, Number, at_once, weather
from pydantic_ai import Agent, NativeOutput, PromptedOutput, RunContext, Tool, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from report import OTHER
from tries import Report

url, model, question, api = sys.argv[1:]
report = Report("pydantic-ai-slim")
MODEL = OpenAIResponsesModel if api == "responses" else OpenAIChatModel
GREEDY: Any = {"temperature": 0, "max_tokens": 256}


def agent(model: str = model, **more: Any) -> Agent[None, Any]:
    served = MODEL(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(served, model_settings=GREEDY, **more)


@report.tries("chat")
async def chat() -> str:
    return (await agent().run(question)).output


@report.tries("streaming")
async def streaming() -> list[str]:
    async with agent().run_stream(question) as run:
        return [piece async for piece in run.stream_text(delta=True, debounce_by=None)]


@report.tries("a tool and the answer to it")
async def tool() -> dict[str, Any]:
    asked: list[str] = []

    def weather_of(city: Literal["Rome", "Oslo"]) -> str:
        """Return the weather of a city."""
        asked.append(city)
        return weather(city)

    async def until_asked(_: RunContext[None], offered: ToolDefinition) -> ToolDefinition | None:
        return None if asked else offered

    class Demanding(AbstractCapability[None]):
        """Demands a call of the tool first; a typed output then demands one of its own."""

        def get_model_settings(self) -> Any:
            return lambda _: {} if asked else {"tool_choice": ["weather_of"]}

    tooled = agent(tools=[Tool(weather_of, prepare=until_asked)], output_type=ToolOutput(Number))
    run = await tooled.run(question, capabilities=[Demanding()])
    return {"asked": asked[:1], "answer": run.output.model_dump(), "turns": len(run.all_messages())}


@report.tries("a tool with auto")
async def streamed_tool() -> dict[str, Any]:
    async with agent(tools=[weather]).run_stream(question) as run:
        return {"answer": await run.get_output()}


@report.tries("a JSON schema")
async def schema() -> dict[str, Any]:
    return (await agent(output_type=NativeOutput(Number)).run(question)).output.model_dump()


@report.tries("a JSON schema as a tool")
async def schema_as_a_tool() -> dict[str, Any]:
    return (await agent(output_type=ToolOutput(Number)).run(question)).output.model_dump()


if api == "chat":  # the Responses API has no field that makes so small a model end an object

    @report.tries("a JSON object")
    async def json_object() -> dict[str, Any]:
        settings: Any = {**GREEDY, "logit_bias": at_once(url, "{}")}
        shaped = agent(output_type=PromptedOutput(Loose))
        return (await shaped.run(question, model_settings=settings)).output.model_dump()


@report.tries("a conversation")
async def conversation() -> dict[str, Any]:
    first = await agent().run(question)
    again = await agent(system_prompt="Be brief.").run("And again?", message_history=first.all_messages())
    return {"roles": [message.kind for message in again.all_messages()], "answer": again.output}


@report.tries("an unknown model")
async def unknown() -> str:
    return (await agent(OTHER).run(question)).output


report.say()
