"""AutoGen: its model client for OpenAI's API, an assistant with a tool, and two assistants that take turns."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelInfo,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.agents.openai import OpenAIAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from forms import Number, weather
from openai import AsyncOpenAI
from report import OTHER
from tries import Report

url, model, question = sys.argv[1:]
report = Report("autogen-agentchat")
# AutoGen asks for this of every model that is not OpenAI's
ABILITIES = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)


def client(model: str = model, **more: Any) -> OpenAIChatCompletionClient:
    served = {"base_url": url, "api_key": "none", "model_info": ABILITIES, "max_retries": 0}
    return OpenAIChatCompletionClient(model=model, temperature=0, max_tokens=64, **served, **more)


@report.tries("chat")
async def chat() -> Any:
    return (await client().create([UserMessage(content=question, source="user")])).content


@report.tries("streaming")
async def streaming() -> list[str]:
    *pieces, _ = [part async for part in client().create_stream([UserMessage(content=question, source="user")])]
    return [piece for piece in pieces if isinstance(piece, str)]


async def weather_of(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    return weather(city)


TOOL = FunctionTool(weather_of, description="Return the weather of a city.", strict=True)


@report.tries("a tool and the answer to it")
async def tool() -> dict[str, Any]:
    asking: list[Any] = [UserMessage(content=question, source="user")]
    once = {"parallel_tool_calls": False}
    demanded = await client().create(asking, tools=[TOOL], tool_choice="required", extra_create_args=once)
    (call,) = demanded.content
    city = json.loads(call.arguments)
    result = FunctionExecutionResult(
        call_id=call.id, name=call.name, content=await TOOL.run_json(city, CancellationToken()), is_error=False
    )
    asking += [AssistantMessage(content=[call], source="tooled"), FunctionExecutionResultMessage(content=[result])]
    answer = await client().create(asking, tools=[TOOL], tool_choice="none", json_output=Number)
    return {"asked": [city["city"]], "answer": json.loads(answer.content)}


@report.tries("a tool with auto")
async def streamed_tool() -> dict[str, Any]:
    agent = AssistantAgent("tooled", client(), tools=[weather_of], reflect_on_tool_use=True, model_client_stream=True)
    run = await agent.run(task=question)
    return {"answer": run.messages[-1].to_text()}


@report.tries("an assistant")
async def assistant() -> dict[str, Any]:
    run = await AssistantAgent("plain", client()).run(task=question)
    return {"messages": [message.source for message in run.messages], "answer": run.messages[-1].to_text()}


@report.tries("an assistant (streamed)")
async def streamed() -> dict[str, Any]:
    agent = AssistantAgent("plain", client(), model_client_stream=True)
    events = [event async for event in agent.run_stream(task=question)]
    pieces = [event.content for event in events if isinstance(event, ModelClientStreamingChunkEvent)]
    answer = events[-1].messages[-1].to_text()
    return {"answer": answer, "same": len(pieces) > 1 and "".join(pieces) == answer}


@report.tries("a JSON schema")
async def schema() -> dict[str, Any]:
    agent = AssistantAgent("shaped", client(), output_content_type=Number)
    return (await agent.run(task=question)).messages[-1].content.model_dump()


@report.tries("a team")
async def team() -> dict[str, Any]:
    both = [AssistantAgent(name, client()) for name in ("first", "second")]
    run = await RoundRobinGroupChat(both, termination_condition=MaxMessageTermination(3)).run(task=question)
    return {"messages": [message.source for message in run.messages]}


@report.tries("OpenAIAgent (Responses)")
async def responses() -> dict[str, Any]:
    asking: Any = {"client": AsyncOpenAI(base_url=url, api_key="none", max_retries=0), "model": model, "temperature": 0}
    agent = OpenAIAgent("kept", "An agent of the Responses API.", instructions="Be brief.", **asking)
    await agent.run(task=question)
    return {"answer": (await agent.run(task="And again?")).messages[-1].to_text()}


@report.tries("an unknown model")
async def unknown() -> Any:
    return (await client(OTHER).create([UserMessage(content=question, source="user")])).content


report.say()
