"""LangGraph: a graph of its own nodes with a model of langchain-openai, and LangChain's agent, which runs on it."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, TypedDict

from forms import Number, weather
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition
from report import OTHER
from tries import Report

url, model, question = sys.argv[1:]
report = Report("langgraph")
asked: list[str] = []


def chat_model(model: str = model, **more: Any) -> Any:
    return ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=128, max_retries=0, **more)


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]


def weather_of(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return weather(city)


def agent(**more: Any) -> Any:
    return create_agent(chat_model(), tools=more.pop("tools", []), **more)


def input_of(text: str = question) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


@report.tries("chat")
def chat() -> str:
    return str(agent().invoke(input_of())["messages"][-1].text)


@report.tries("streaming")
async def streaming() -> list[str]:
    pieces = [piece.text async for piece, _ in agent().astream(input_of(), stream_mode="messages")]
    return [piece for piece in pieces if piece]


def turn(state: State) -> dict[str, Any]:
    """Demand a call in the first turn, and leave the model free after its result: but for more than one other call."""
    free = isinstance(state["messages"][-1], ToolMessage)
    choice = "none" if len(asked) > 1 else "auto" if free else "required"
    bound = chat_model().bind_tools([weather_of], tool_choice=choice, strict=True)
    return {"messages": [bound.invoke(state["messages"])]}


@report.tries("a tool and the answer to it")
def tool() -> dict[str, Any]:
    graph = StateGraph(State)
    graph.add_node("model", turn)
    graph.add_node("tools", ToolNode([weather_of]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition, {"tools": "tools", END: END})
    graph.add_edge("tools", "model")
    messages = graph.compile().invoke(input_of())["messages"]
    return {"asked": asked[:1], "result": messages[2].content, "answer": messages[-1].text}


@report.tries("a tool with auto")
def streamed_tool() -> dict[str, Any]:
    *_, last = agent(tools=[weather_of]).stream(input_of(), stream_mode="values")
    return {"answer": last["messages"][-1].text}


@report.tries("a JSON schema")
def schema() -> dict[str, Any]:
    return agent(response_format=ProviderStrategy(Number)).invoke(input_of())["structured_response"].model_dump()


@report.tries("a JSON schema beside a tool")
def schema_beside_a_tool() -> dict[str, Any]:
    shaped = agent(tools=[weather_of], response_format=ProviderStrategy(Number))
    return shaped.invoke(input_of())["structured_response"].model_dump()


@report.tries("a JSON schema as a tool")
def schema_as_a_tool() -> dict[str, Any]:
    once = chat_model(model_kwargs={"parallel_tool_calls": False})  # or the model would call it again and again
    shaped = create_agent(once, tools=[], response_format=ToolStrategy(Number))
    return shaped.invoke(input_of())["structured_response"].model_dump()


@report.tries("a conversation")
def conversation() -> dict[str, Any]:
    kept, one = agent(checkpointer=InMemorySaver()), {"configurable": {"thread_id": "one"}}
    kept.invoke(input_of(), one)
    again = kept.invoke(input_of("And again?"), one)
    return {"roles": [message.type for message in again["messages"]], "answer": again["messages"][-1].text}


@report.tries("chat by the Responses API")
def responses() -> str:
    return str(create_agent(chat_model(use_responses_api=True), tools=[]).invoke(input_of())["messages"][-1].text)


@report.tries("a broken call that comes back")
def broken_call() -> dict[str, Any]:
    broken = {"name": "weather_of", "args": '{"city": "Ro', "id": "call_1", "error": None, "type": "invalid_tool_call"}
    result = ToolMessage("The arguments are no JSON.", tool_call_id="call_1", status="error")
    said = [*input_of()["messages"], AIMessage("", invalid_tool_calls=[broken]), result]
    return {"answer": chat_model().bind_tools([weather_of]).invoke(said).text}


@report.tries("an unknown model")
def unknown() -> Any:
    return create_agent(chat_model(OTHER), tools=[]).invoke(input_of())


report.say()
