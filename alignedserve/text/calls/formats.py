"""The formats in which models call tools, as a table: how a template gives each away, where calls stand in a text, and
how one call is written.

A format of the same name may have several rows, where models of one family write in different ways but are read in one.

A template that knows no tools has them in the system message, and calls and results in plain messages of the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, TypeAlias
from uuid import uuid4

from alignedserve.config.choices import CALL_FORMATS
from alignedserve.text.calls.layouts import (
    CallLayout,
    HarmonyCalls,
    JsonCalls,
    MistralCalls,
    PythonCalls,
    SectionCalls,
    TaggedCalls,
)

SHORT_ID = 9  # letters and digits of an id of a call, for Mistral's templates


@dataclass(frozen=True)
class CallFormat:
    """A format in which models call tools; its name is vLLM's."""

    name: str
    layout: CallLayout
    frame: tuple[str, str, str]  # what stands before the calls, between two of them, and after them
    openings: tuple[str, ...] = ()  # the texts that begin calls
    others: tuple[str, ...] = ()  # other markers, which may be special tokens as the openings may
    signs: tuple[tuple[str, ...], ...] = ()  # a template that has all texts of one of these shows this format
    stands_aside: bool = False  # whether calls stand in a channel of their own, apart from answers
    begins_answer: bool = False  # whether calls may stand at the start of an answer without any marker
    has_short_ids: bool = False  # whether the templates of such models take short ids of calls only

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that a reader must see even if they are special tokens."""
        return (*self.openings, *self.others)

    def make_id(self) -> str:
        """Return the id of a new call."""
        drawn = uuid4().hex
        return drawn[:SHORT_ID] if self.has_short_ids else f"call_{drawn[:24]}"

    @property
    def has_mark(self) -> bool:
        """Whether each call, as it is written here, begins with a text that tells it from other text."""
        return bool(self.openings) and self.frame[0].startswith(self.openings)

    @property
    def is_whole_answer(self) -> bool:
        """Whether calls, as they are written here, are JSON that is all of an answer."""
        return self.begins_answer and not self.has_mark and isinstance(self.layout, JsonCalls)

    def is_shown_by(self, template: str) -> bool:
        return any(all(sign in template for sign in signs) for signs in self.signs)

    @property
    def without_marker(self) -> CallFormat:
        """Return the same format, in which calls in JSON may also lack their marker at the start of an answer: small
        models forget it, and Qwen2.5-Coder writes a block of code."""
        return replace(self, begins_answer=True) if isinstance(self.layout, JsonCalls) else self

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        before, between, after = self.frame
        return before + between.join(self.layout.write(name, arguments) for name, arguments in calls) + after


def _section(name: str, marks: Sequence[str], shape: tuple[str, str], *signs: tuple[str, ...]) -> CallFormat:
    layout = SectionCalls(*marks, shape=shape)
    frame = layout.opens + layout.begins, layout.ends + layout.begins, layout.ends + layout.closes
    others = (layout.parts, layout.ends, layout.closes)
    return CallFormat(name, layout, frame, (layout.opens, layout.begins), others, signs)


def deepseek_marker(words: str) -> str:
    """Return a marker of DeepSeek's, whose bars and spaces are characters of their own."""
    return "<\uff5c{}\uff5c>".format(words.replace(" ", "\u2581"))


def _tagged(
    name: str, layout: CallLayout, opens: str, closes: str, *signs: tuple[str, ...], also: str = ""
) -> CallFormat:
    """Return a format with each call between two tags; `also` may begin a call too."""
    frame = f"{opens}\n", f"\n{closes}\n{opens}\n", f"\n{closes}"
    openings = (opens, also) if also else (opens,)
    return CallFormat(name, layout, frame, openings, (closes,), signs or ((opens,),))


def _listed(name: str, layout: CallLayout, opens: str, closes: str, *signs: tuple[str, ...], **more: Any) -> CallFormat:
    """Return a format with a list of calls between two markers."""
    made = CallFormat(name, layout, (f"{opens}[", ", ", f"]{closes}"), (opens,), (closes,), signs or ((opens,),))
    return replace(made, **more)


_PARTS = "tool calls begin", "tool calls end", "tool call begin", "tool sep", "tool call end"
_DEEPSEEK, _SEPARATOR = [*map(deepseek_marker, _PARTS)], deepseek_marker("tool sep")
_ARGUMENTS, _SECTION = "<|tool_call_argument_begin|>", ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI = (*_SECTION, "<|tool_call_begin|>", _ARGUMENTS, "<|tool_call_end|>")
_TO = "<|channel|>commentary to="
_HARMONY = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>"
_TAGS = _TAG_OPEN, _TAG_CLOSE = "<tool_call>", "</tool_call>"
_SEED_TAGS = "<seed:tool_call>", "</seed:tool_call>"
_GLM_TAGS = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_QWEN_TAGS = "<parameter=", ">", "", "</parameter>", "</function>"
_ACTION = "<|START_ACTION|>", "<|END_ACTION|>"
_PYTHON = "<|python_start|>", "<|python_end|>"
_PHI = _PHI_OPEN, _PHI_CLOSE = "<|tool_call|>", "<|/tool_call|>"
_PHI_BEGINS = "functools", _PHI_OPEN

HERMES = _tagged("hermes", JsonCalls((_TAG_CLOSE,)), *_TAGS)
LLAMA3_JSON = CallFormat(
    "llama3_json",
    JsonCalls(argument_keys=("parameters", "arguments"), known_only=True),
    ("", "; ", ""),
    ("<|python_tag|>",),
    signs=(("tool_calls", '"parameters"'),),
    begins_answer=True,
)
FORMATS = (  # the first row that a template shows is its model's
    CallFormat(
        "openai",
        HarmonyCalls(),
        (_TO, f"<|call|><|start|>assistant{_TO}", "<|call|>"),
        (_TO, f"<|start|>assistant{_TO}", "<|start|>assistant to=", "<|channel|>analysis to="),
        _HARMONY,
        (("<|channel|>", "to=functions."),),
        stands_aside=True,
    ),
    CallFormat(
        "mistral",
        MistralCalls(),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", ""),
        ("[TOOL_CALLS]",),
        ("[CALL_ID]", "[ARGS]"),
        (("[TOOL_CALLS]", "[ARGS]"),),
        has_short_ids=True,
    ),
    _listed("mistral", JsonCalls(), "[TOOL_CALLS]", "", others=(), has_short_ids=True),
    _section("deepseek_v3", _DEEPSEEK, (f"function{_SEPARATOR}NAME\n```json\n", "\n```"), (_SEPARATOR, "```json")),
    _section("deepseek_v31", _DEEPSEEK, (f"NAME{_SEPARATOR}", ""), (_SEPARATOR,)),
    _section("kimi_k2", _KIMI, (f"functions.NAME:0{_ARGUMENTS}", ""), (_ARGUMENTS,)),
    CallFormat(
        "glm45",
        TaggedCalls("", "", *_GLM_TAGS, _TAG_CLOSE),
        (_TAG_OPEN, f"\n{_TAG_OPEN}", ""),
        (_TAG_OPEN,),
        (_TAG_CLOSE, *_GLM_TAGS),
        ((_TAG_OPEN, "<arg_key>"),),
    ),
    _tagged(
        "qwen3_coder",
        TaggedCalls("<function=", ">", *_QWEN_TAGS, _TAG_CLOSE, has_lines=True),
        *_TAGS,
        (_TAG_OPEN, "<function="),
        also="<function=",
    ),
    _tagged("seed_oss", TaggedCalls("<function=", ">", *_QWEN_TAGS, _SEED_TAGS[1]), *_SEED_TAGS),
    _listed("cohere_command3", JsonCalls(_ACTION[1:], ("tool_name", "name"), ("parameters", "arguments")), *_ACTION),
    _listed(
        "phi4_mini_json", JsonCalls(), "functools", "", ("functools[",), openings=_PHI_BEGINS, others=(_PHI_CLOSE,)
    ),
    _listed("phi4_mini_json", JsonCalls((_PHI_CLOSE,)), *_PHI, (_PHI_CLOSE,), openings=_PHI_BEGINS),
    _listed("granite", JsonCalls(), _PHI_OPEN, "", openings=(_PHI_OPEN, _TAG_OPEN), others=(_TAG_CLOSE,)),
    HERMES,
    _listed(
        "llama4_pythonic",
        PythonCalls(_PYTHON[1:]),
        *_PYTHON,
        ("<|python_start|>",),
        ("<|header_start|>", "[func_name1("),
        begins_answer=True,
    ),
    CallFormat("pythonic", PythonCalls(), ("[", ", ", "]"), signs=(("[func_name1(",),), begins_answer=True),
    LLAMA3_JSON,
)
GENERAL = HERMES  # for models that know no format: it needs no special tokens


def find_call_format(template: str) -> CallFormat | None:
    """Return the format in which the chat template shows calls to its model; None if it is not known here."""
    return next((form for form in FORMATS if form.is_shown_by(template)), None)


def named_call_format(name: str, template: str = "") -> CallFormat:
    """Return the format of this name, in the row that the template shows if there are several."""
    rows = [form for form in FORMATS if form.name == CALL_FORMATS[name]]
    return next((form for form in rows if form.is_shown_by(template)), rows[0])


# --- Tools and calls, as a chat template can take them


Message: TypeAlias = Mapping[str, Any]
_MANUAL = """# Tools

These functions can be called:
{tools}

To call one, write:
{example}

Write nothing after a call: its result is sent to you. Where no function is needed, answer in words."""


def described(
    messages: Sequence[Message], tools: Sequence[Message], form: CallFormat, apart: bool = True
) -> list[Message]:
    """Return the messages with the tools described in them, and with calls and results as text.

    `apart`: the description is a system message; otherwise it stands in the first message of the user."""
    plain = list(_plain(messages, form))
    if not tools:
        return plain
    role = "system" if apart else "user"
    manual = _MANUAL.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
        example=form.write([("NAME", {"ARGUMENT": "VALUE"})]),
    )
    at = next((place for place, message in enumerate(plain) if message["role"] == role), None)
    if at is None or (apart and at != 0):
        return [{"role": role, "content": manual}, *plain]
    said = plain[at]["content"]
    text = f"{said}\n\n{manual}" if apart else f"{manual}\n\n{said}"
    return [*plain[:at], {**plain[at], "content": text}, *plain[at + 1 :]]


def _plain(messages: Sequence[Message], form: CallFormat) -> Iterator[Message]:
    """Yield the messages with calls in the text of the assistant, and results in texts of the user."""
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        if not message.get("tool_calls"):
            yield message
            continue
        functions = [call["function"] for call in message["tool_calls"]]
        calls = form.write([(function["name"], _object(function["arguments"])) for function in functions])
        shown = {name: value for name, value in message.items() if name != "tool_calls"}
        yield {**shown, "content": f"{message['content']}\n{calls}" if message["content"] else calls}
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _object(arguments: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """Return the arguments, or an object around their text where the model wrote none."""
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def with_short_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with short ids of calls in place of those that come from elsewhere."""
    shown = [dict(message) for message in messages]
    for message in shown:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": _short(call["id"])} for call in calls]
        if (answered := message.get("tool_call_id")) is not None:
            message["tool_call_id"] = _short(answered)
    return shown


def _short(id: str) -> str:
    """Return the id, or a short one that is always the same for it."""
    return id if len(id) == SHORT_ID and id.isalnum() else sha256(id.encode()).hexdigest()[:SHORT_ID]
