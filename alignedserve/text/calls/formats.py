"""The formats in which models call tools: how each is recognised in a chat template, and how it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from alignedserve.text.calls.reading import CallReader, HermesCalls, Llama3Calls


@dataclass(frozen=True)
class CallFormat:
    """A format in which models call tools; its name is vLLM's."""

    name: str
    is_shown_by: Callable[[str], bool]  # whether a chat template shows earlier calls in this format
    make_reader: Callable[[int | None], CallReader]
    markers: tuple[str, ...] = ()  # texts that begin and end calls; they may be special tokens of a model


HERMES = CallFormat(
    "hermes",
    lambda template: "<tool_call>" in template and "<function=" not in template,
    HermesCalls,
    ("<tool_call>", "</tool_call>"),
)
LLAMA3_JSON = CallFormat(
    "llama3_json", lambda template: "tool_calls" in template and '"parameters"' in template, Llama3Calls
)
FORMATS = (HERMES, LLAMA3_JSON)  # the first that a template shows is the model's


def find_call_format(template: str) -> CallFormat | None:
    """Return the format in which the chat template shows earlier calls to its model; None if it is not known here."""
    return next((form for form in FORMATS if form.is_shown_by(template)), None)
