"""instructor, in every mode that it has for OpenAI's API."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import instructor
import openai
from forms import FENCED, Loose, Number
from instructor import Mode
from pydantic import field_validator
from report import OTHER
from tries import Report

url, model, question = sys.argv[1:]
report = Report("instructor")
ASKED: Any = {
    "model": model,
    "messages": [{"role": "user", "content": question}],
    "temperature": 0,
    "max_tokens": 256,
    "max_retries": 0,
}
STRICT: Any = {"response_model": Number}
# the prompt alone says what is wanted in these modes, and the model is too small to follow all of it
JSON: Any = {"response_model": Loose}
MD_JSON: Any = {"response_model": Number, "extra_body": {"structured_outputs": {"regex": FENCED}}}
MODES = {
    Mode.TOOLS: STRICT,
    Mode.TOOLS_STRICT: STRICT,
    Mode.FUNCTIONS: STRICT,
    Mode.PARALLEL_TOOLS: STRICT,
    Mode.JSON_SCHEMA: STRICT,
    Mode.JSON: JSON,
    Mode.JSON_O1: JSON,
    Mode.MD_JSON: MD_JSON,
    Mode.RESPONSES_TOOLS: STRICT,
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS: STRICT,
}


def client(mode: Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)


def asks(mode: Mode) -> Callable[[], dict[str, Any]]:
    return lambda: client(mode).create(**ASKED, **MODES[mode]).model_dump()


def streams(mode: Mode) -> Callable[[], dict[str, Any]]:
    def stream() -> dict[str, Any]:
        *_, last = client(mode).create_partial(**ASKED, **MODES[mode])
        return dict(last.model_dump())

    return stream


def several() -> dict[str, Any]:
    # instructor leaves the choice to the model, which would call nothing, or again and again
    demanded = {"tool_choice": "required", "parallel_tool_calls": False}
    first, *_ = client(Mode.PARALLEL_TOOLS).create(**ASKED, response_model=Iterable[Number], extra_body=demanded)
    return dict(first.model_dump())


for mode in MODES:
    if mode is Mode.PARALLEL_TOOLS:  # it does not stream
        report.tries("mode PARALLEL_TOOLS")(several)
    else:
        report.tries(f"mode {mode.name}")(asks(mode))
        report.tries(f"mode {mode.name} (streamed)")(streams(mode))


@report.tries("an answer that is asked for again")
def asked_again() -> list[int]:
    seen: list[int] = []

    class Second(Number):
        @field_validator("number")
        @classmethod
        def check(cls, number: int) -> int:
            seen.append(number)
            assert len(seen) > 1, "give another number"
            return number

    client(Mode.TOOLS).create(**{**ASKED, "max_retries": 1}, response_model=Second)
    return seen


@report.tries("an unknown model")
def unknown() -> Any:
    return client(Mode.TOOLS).create(**{**ASKED, "model": OTHER}, response_model=Number).model_dump()


report.say()
