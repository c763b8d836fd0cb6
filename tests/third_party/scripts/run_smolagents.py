"""smolagents: its model for OpenAI's API, and its agents that call tools by JSON and by code."""

# no `from __future__ import annotations`: smolagents reads the types of a tool's parameters as they are
import json
import sys
from typing import Any, Literal

from forms import at_once, weather
from report import OTHER
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessageStreamDelta
from tries import Report

url, model, question = sys.argv[1:]
report = Report("smolagents")
ASKING: Any = [{"role": "user", "content": [{"type": "text", "text": question}]}]
asked: list[str] = []
# the model is too small to write code of its own: the server's own field holds it to this text
CODE = "Thought: I ask.\n<code>\nfinal_answer(weather_of('Rome'))\n"
WRITES_CODE: Any = {"extra_body": {"structured_outputs": {"choice": [CODE]}}}
DEMANDED: Any = {"tool_choice": {"type": "function", "function": {"name": "weather_of"}}}


def served(model: str = model, **more: Any) -> OpenAIModel:
    settings = {"temperature": 0, "max_tokens": 128, **more}
    return OpenAIModel(model, api_base=url, api_key="none", client_kwargs={"max_retries": 0}, **settings)


@tool
def weather_of(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city.

    Args:
        city: The name of the city.
    """
    asked.append(city)
    return weather(city)


@report.tries("chat")
def chat() -> str:
    return str(served().generate(ASKING).content)


@report.tries("streaming")
def streaming() -> list[str]:
    deltas: list[ChatMessageStreamDelta] = list(served().generate_stream(ASKING))
    return [delta.content for delta in deltas if delta.content]


def run(agent: Any) -> dict[str, Any]:
    asked.clear()
    return {"answer": str(agent.run(question)), "asked": asked[:1]}


@report.tries("CodeAgent")
def code_agent() -> dict[str, Any]:
    return run(CodeAgent(tools=[weather_of], model=served(**WRITES_CODE), max_steps=1))


@report.tries("CodeAgent (streamed)")
def streamed_code_agent() -> dict[str, Any]:
    return run(CodeAgent(tools=[weather_of], model=served(**WRITES_CODE), max_steps=1, stream_outputs=True))


@report.tries("CodeAgent by a JSON schema")
def structured_code_agent() -> dict[str, Any]:
    brief = served(logit_bias=at_once(url, '"'))
    agent = CodeAgent(tools=[weather_of], model=brief, max_steps=1, use_structured_outputs_internally=True)
    agent.run(question)
    return {"wrote": sorted(json.loads(str(agent.memory.steps[1].model_output)))}


def set_free(_: Any, agent: Any) -> None:
    agent.model.kwargs.pop("tool_choice", None)


def calling(**more: Any) -> ToolCallingAgent:
    """Make an agent whose first step calls the tool."""
    return ToolCallingAgent(
        tools=[weather_of], model=served(**DEMANDED), max_steps=1, step_callbacks=[set_free], **more
    )


@report.tries("ToolCallingAgent")
def tool_calling_agent() -> dict[str, Any]:
    return run(calling())


@report.tries("ToolCallingAgent (streamed)")
def streamed_tool_calling_agent() -> dict[str, Any]:
    return run(calling(stream_outputs=True))


@report.tries("an unknown model")
def unknown() -> Any:
    return served(OTHER).generate(ASKING).content


report.say()
