"""openai-agents with its defaults: an agent with a tool, which goes on with what the tool returns, and a session."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

url, model, question = sys.argv[1:]
set_default_openai_client(AsyncOpenAI(base_url=url, api_key="none", max_retries=0), use_for_tracing=False)
set_tracing_disabled(True)
asked: list[str] = []


class Number(BaseModel):
    number: int
    word: Literal["odd", "even"]


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return "It rains."


async def streamed(agent: Agent[Any]) -> str:
    run = Runner.run_streamed(agent, question)
    deltas = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert len(deltas) > 1
    assert "".join(deltas) == run.final_output
    return str(run.final_output)


async def main() -> dict[str, Any]:
    greedy = ModelSettings(temperature=0)
    plain = Agent(name="plain", model=model, model_settings=greedy)
    forced = ModelSettings(temperature=0, tool_choice="required")
    tooled = Agent(name="tooled", model=model, model_settings=forced, tools=[weather])
    shaped = Agent(name="shaped", model=model, output_type=Number)
    session = SQLiteSession("one")
    await Runner.run(plain, question, session=session)
    again = await Runner.run(plain, "And again?", session=session)
    first = await Runner.run(plain, question)
    chained = await Runner.run(plain, "And again?", previous_response_id=first.last_response_id)
    calls = await Runner.run(tooled, question)
    return {
        "version": version("openai-agents"),
        "text": first.final_output,
        "streamed": await streamed(plain),
        "turns": len(session_items := await session.get_items()) and [item["role"] for item in session_items],
        "same": chained.final_output == again.final_output,
        "asked": asked,
        "after_the_tool": isinstance(calls.final_output, str),
        "shaped": (await Runner.run(shaped, question)).final_output.model_dump(),
    }


print(json.dumps(asyncio.run(main())))
