"""DSPy, whose programs reach us through LiteLLM."""

from __future__ import annotations

import sys
from typing import Any, Literal

import dspy
from forms import weather
from report import OTHER
from tries import Report

url, model, question = sys.argv[1:]
report = Report("dspy")


class Parity(dspy.Signature):
    """Say whether the number is odd or even."""

    number: int = dspy.InputField()
    word: Literal["odd", "even"] = dspy.OutputField()


def ask(program: Any, adapter: Any, model: str = model, **given: Any) -> Any:
    lm = dspy.LM(f"openai/{model}", api_base=url, api_key="none", temperature=0, max_tokens=256, num_retries=0)
    with dspy.context(lm=lm, adapter=adapter):
        return program(**given)


@report.tries("chat")
def chat() -> str:
    return str(ask(dspy.Predict("question -> answer"), dspy.ChatAdapter(), question=question).answer)


@report.tries("a JSON schema")
def schema() -> str:
    return str(ask(dspy.Predict(Parity), dspy.JSONAdapter(), number=7).word)


@report.tries("a tool with native calls")
def tool() -> dict[str, Any]:
    signature = dspy.Signature("question: str, tools: list[dspy.Tool] -> calls: dspy.ToolCalls")
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    told = ask(dspy.Predict(signature), adapter, question="How is the weather in Rome?", tools=[dspy.Tool(weather)])
    return {"calls": [{"name": call.name, "args": call.args} for call in told.calls.tool_calls]}


@report.tries("an unknown model")
def unknown() -> str:
    return str(ask(dspy.Predict("question -> answer"), dspy.ChatAdapter(), OTHER, question=question).answer)


report.say()
