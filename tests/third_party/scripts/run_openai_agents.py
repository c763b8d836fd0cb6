"""openai-agents, by the Responses API, which is its default, or by chat completions."""

from __future__ import annotations

import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from forms import Number, weather
from openai import AsyncOpenAI
from report import OTHER
from tries import Report

url, model, question, api = sys.argv[1:]
set_default_openai_client(AsyncOpenAI(base_url=url, api_key="none", max_retries=0), use_for_tracing=False)
set_default_openai_api("responses" if api == "responses" else "chat_completions")
set_tracing_disabled(True)
report = Report("openai-agents")
GREEDY = ModelSettings(temperature=0, max_tokens=64)
FORCED = ModelSettings(temperature=0, max_tokens=64, tool_choice="required", parallel_tool_calls=False)
PLAIN: Agent[Any] = Agent(name="plain", model=model, model_settings=GREEDY)
asked: list[str] = []


@function_tool(is_enabled=lambda *_: not asked)  # the model would call it in every turn
def weather_of(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return weather(city)


@report.tries("chat")
async def chat() -> str:
    return str((await Runner.run(PLAIN, question)).final_output)


@report.tries("streaming")
async def streaming() -> list[str]:
    run = Runner.run_streamed(PLAIN, question)
    events = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
    return [event.delta for event in events if event.type == "response.output_text.delta"]


@report.tries("a tool and the answer to it")
async def tool() -> dict[str, Any]:
    # the framework itself goes on with `auto` after the first call
    agent = Agent(name="tooled", model=model, model_settings=FORCED, tools=[weather_of], output_type=Number)
    run = await Runner.run(agent, question)
    return {"asked": [*asked], "answer": run.final_output.model_dump()}


@report.tries("a tool with auto")
async def streamed_tool() -> dict[str, Any]:
    asked.clear()
    agent = Agent(name="tooled", model=model, model_settings=GREEDY, tools=[weather_of])
    run = Runner.run_streamed(agent, question)
    async for _ in run.stream_events():
        pass
    return {"answer": run.final_output}


@report.tries("a JSON schema")
async def schema() -> dict[str, Any]:
    agent = Agent(name="shaped", model=model, model_settings=GREEDY, output_type=Number)
    return (await Runner.run(agent, question)).final_output.model_dump()


@report.tries("a second agent that takes over")
async def handoff() -> dict[str, Any]:
    second = Agent(name="second", model=model, model_settings=GREEDY, output_type=Number)
    first = Agent(name="first", model=model, model_settings=FORCED, handoffs=[second])
    run = await Runner.run(first, question)
    return {"last": run.last_agent.name, "answer": run.final_output.model_dump()}


@report.tries("a conversation")
async def conversation() -> dict[str, Any]:
    session = SQLiteSession("one")
    await Runner.run(PLAIN, question, session=session)
    again = await Runner.run(PLAIN, "And again?", session=session)
    return {"roles": [item["role"] for item in await session.get_items()], "answer": again.final_output}


if api == "responses":

    @report.tries("a conversation that the server keeps")
    async def chained() -> dict[str, Any]:
        first = await Runner.run(PLAIN, question)
        again = await Runner.run(PLAIN, "And again?", previous_response_id=first.last_response_id)
        return {"answer": again.final_output}


@report.tries("an unknown model")
async def unknown() -> str:
    return str((await Runner.run(Agent(name="plain", model=OTHER), question)).final_output)


report.say()
