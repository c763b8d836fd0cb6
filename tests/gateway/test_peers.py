"""Tests of what clients of other servers send: a name that means the same is taken, one that means nothing here is told
in a header, a typo is refused with the name that was meant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.gateway.openai.peers import LEFT_OUT, OF_OPTIONS, TAKEN
from alignedserve.text.syntax import Syntaxes
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import FakeOwner, Gateway, data_lines, ids_of
from tests.rare import rare

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
GBNF = '# an answer\nroot ::= "yes" | "no" [!]{0,2}'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
IGNORED = "x-ignored-fields"
ROUTES = pytest.mark.parametrize("route", ["chat", "complete"])


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    return Gateway(text, FakeOwner((5,), (2,)))


def error_of(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"n_predict": 5}, {"max_tokens": 5}),
    ({"num_predict": 5}, {"max_tokens": 5}),
    ({"json_schema": SCHEMA}, {"guided_json": SCHEMA}),
    ({"format": SCHEMA}, {"guided_json": SCHEMA}),
    ({"format": "json"}, {"response_format": {"type": "json_object"}}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"guided_json": SCHEMA}),
    ({"grammar": 'start: "a"'}, {"guided_grammar": 'start: "a"'}),
    ({"n": 2, "best_of": 2}, {"n": 2}),
    ({"random_seed": 5}, {}),
    ({"options": {"temperature": 0.5, "stop": ["a"], "num_predict": 5}}, {"temperature": 0.5, "max_tokens": 5}),
    ({"options": {"repeat_penalty": 2.0, "top_k": 3}, "top_k": 3}, {"repetition_penalty": 2.0, "top_k": 3}),
    ({"options": None, "repeat_penalty": None, "num_ctx": None}, {}),
]


@ROUTES
@pytest.mark.parametrize(("fields", "ours"), ALIKE)
def test_a_name_that_means_the_same_is_taken(
    gateway: Gateway, route: str, fields: dict[str, Any], ours: dict[str, Any]
) -> None:
    answers = [getattr(gateway, route)(seed=5, **asked) for asked in (fields, ours)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert IGNORED not in answers[0].headers
    opened = [replace(request, id="", arrival_at=0.0) for request in gateway.owner.opened]
    assert opened[: len(opened) // 2] == opened[len(opened) // 2 :]


@pytest.mark.parametrize(
    ("fields", "ours"),
    [
        ({"think": False}, {"enable_thinking": False}),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "auto", "budget_tokens": 5}}, {"max_reasoning_tokens": 5}),
        ({"max_tokens": -1}, {}),
        ({"options": {"num_predict": -2}}, {}),
        ({"functions": [], "function_call": "none"}, {}),
        ({"tools": [WEATHER], "tool_choice": "any"}, {"tools": [WEATHER], "tool_choice": "required"}),
    ],
)
def test_chats_take_more(gateway: Gateway, fields: dict[str, Any], ours: dict[str, Any]) -> None:
    answers = [gateway.chat(seed=5, **asked) for asked in (fields, ours)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    theirs, own = (replace(request, id="", arrival_at=0.0) for request in gateway.owner.opened)
    assert theirs == own
    names = {name for name in answers[1].headers.get(IGNORED, "").split(", ") if name}
    assert {*answers[0].headers.get(IGNORED, "").split(", ")} - {""} == ({*fields} if names else set())


@ROUTES
def test_a_name_that_means_nothing_here_is_told(gateway: Gateway, route: str) -> None:
    names = sorted(LEFT_OUT)
    asked = {**dict.fromkeys(names, 5), "options": dict.fromkeys(names, 0.5)}
    answer = getattr(gateway, route)(**asked)
    assert answer.headers[IGNORED].split(", ") == [*names, *(f"options.{name}" for name in names)]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tempereture": 0}, "tempereture", "there is no such field: did you mean temperature?"),
        ({"options": {"temprature": 0}}, "options.temprature", "did you mean temperature?"),
        ({"options": {"messages": []}}, "options.messages", "there is no such field"),
        ({"options": 5}, "options", "there is no such field"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag", "include_usage?"),
        ({"q" * 9000: 1}, "q" * 9000, "there is no such field"),
        ({"repeat_penalty": 0}, "repeat_penalty", "repeat_penalty: Input should be greater than 0"),
        ({"options": {"top_p": 2}}, "options.top_p", "options.top_p: Input should be less than or equal to 1"),
        ({"options": {"stop": ["a", 5]}}, "options.stop[1]", "options.stop[1]: Input should be a valid string"),
        ({"num_predict": -5}, "num_predict", "num_predict: Input should be"),
        ({"num_predict": 5, "max_tokens": 6}, "num_predict", "max_tokens sets the same"),
        ({"repeat_penalty": 2, "options": {"repeat_penalty": 3}}, "options.repeat_penalty", "repeat_penalty sets the"),
        ({"json_schema": {"not": {}}}, "json_schema", "json_schema cannot be followed"),
        ({"grammar": "root ::= odd"}, "grammar", "grammar cannot be followed: Rule 'odd' not found"),
        ({"grammar": "root ::= ("}, "grammar", "Expected ')'"),
        ({"grammar": "odd"}, "grammar", "grammar cannot be followed"),
        ({"grammar": GBNF, "format": "json"}, "format", "format: grammar also sets the form of the answer"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "only allowed if"),
        ({"best_of": 2}, "best_of", "best_of is supported only if it equals n"),
        ({"thinking": {"type": "odd"}}, "thinking", "thinking: Input should be a valid boolean"),
        ({"thinking": {"type": "enabled", "odd": 1}}, "thinking", "thinking: Input should be a valid boolean"),
    ],
)
def test_an_error_says_the_clients_own_word(gateway: Gateway, fields: dict[str, Any], param: str, words: str) -> None:
    error = error_of(gateway.chat(**fields))
    assert (error["param"], words in error["message"]) == (param, True), error
    assert gateway.owner.opened == []


def test_no_name_is_of_two_kinds() -> None:
    assert not (TAKEN.keys() | OF_OPTIONS) & LEFT_OUT


def test_rules_of_llama_cpp_are_followed(gateway: Gateway) -> None:
    for fields in ({"grammar": GBNF}, {"guided_grammar": GBNF}, {"structured_outputs": {"grammar": GBNF}}):
        assert gateway.chat(**fields).status_code == 200
    (syntax,) = {request.sampling.syntax for request in gateway.owner.opened}
    for written, is_right in (("yes", True), ("no!!", True), ("no!!!", False), ("maybe", False)):
        matcher = Syntaxes(gateway.text.trial.folder).matcher(syntax)
        ids = list(ids_of(gateway.text, written))
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is is_right


@rare  # it takes the seconds of a processor that a trial may take
def test_hostile_rules_end_in_time(gateway: Gateway) -> None:
    chain = "root ::= a0\n" + "".join(f"a{at} ::= a{at + 1}\n" for at in range(6000)) + 'a6000 ::= "x"'
    assert "grammar cannot be followed" in error_of(gateway.chat(grammar=chain))["message"]


# --- Functions, as OpenAI's clients called tools before there were any

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = {"functions": [{"name": "weather", "parameters": PARAMETERS}, {"name": "time"}]}
TOOLS = {"tools": [{"type": "function", "function": function} for function in FUNCTIONS["functions"]]}
USER = {"role": "user", "content": "Hi"}
CALL = {"name": "weather", "arguments": '{"city": "Rom"}'}


@pytest.fixture
def calling(text: TextModel) -> Gateway:
    ids = ids_of(text, text.call_format.write([("weather", {"city": "Rom"}), ("time", {})]))
    return Gateway(text, FakeOwner(*((token,) for token in (*ids, text.eos_ids[0]))), max_model_len=1024)


def test_a_function_is_called_in_the_older_form(calling: Gateway) -> None:
    (choice,) = calling.chat(**FUNCTIONS).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["function_call"]) == ("function_call", CALL)
    assert "tool_calls" not in choice["message"]
    chunks = [chunk["choices"][0] for chunk in data_lines(calling.chat(**FUNCTIONS, stream=True))[:-1]]
    parts = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert (parts[0]["name"], [*filter(None, (part.get("name") for part in parts[1:]))]) == ("weather", [])
    assert "".join(part["arguments"] for part in parts) == CALL["arguments"]
    assert (len(parts) > 2, chunks[-1]["finish_reason"]) == (True, "function_call")


@pytest.mark.parametrize(
    ("choice", "newer"),
    [
        (None, None),
        ("auto", "auto"),
        ("none", "none"),
        ({"name": "time"}, {"type": "function", "function": {"name": "time"}}),
    ],
)
def test_functions_are_shown_and_demanded_as_tools_are(calling: Gateway, choice: Any, newer: Any) -> None:
    older = calling.chat(**FUNCTIONS, function_call=choice)
    newer = calling.chat(**TOOLS, tool_choice=newer, parallel_tool_calls=False)
    assert (older.status_code, newer.status_code) == (200, 200), older.text
    first, second = ((request.prompt, request.sampling.syntax) for request in calling.owner.opened)
    assert first == second


def test_the_older_conversation_comes_back(calling: Gateway) -> None:
    called = {"role": "assistant", "content": None, "function_call": CALL}
    answered = {"role": "function", "name": "weather", "content": "rain"}
    call = {"id": "call_weather", "type": "function", "function": CALL}
    newer = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    newer.append({"role": "tool", "tool_call_id": "call_weather", "content": "rain", "name": "weather"})
    calling.chat(messages=[USER, called, answered], **FUNCTIONS)
    calling.chat(messages=[USER, *newer], **TOOLS)
    first, second = (request.prompt for request in calling.owner.opened)
    assert first == second
    assert "rain" in calling.text.decode_all(first)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [{"name": "a"}] * 2}, "functions"),
        ({**FUNCTIONS, **TOOLS}, "functions"),
        ({**TOOLS, "function_call": {"name": "time"}}, "functions"),
        ({**FUNCTIONS, "tool_choice": "auto"}, "functions"),
        ({**FUNCTIONS, "function_call": {"name": "odd"}}, "function_call"),
        ({**FUNCTIONS, "function_call": "odd"}, "function_call"),
        ({"functions": [{"name": "f", "parameters": {"not": {}}}], "function_call": {"name": "f"}}, "function_call"),
        ({"messages": [{**USER, "function_call": CALL}]}, "messages[0].function_call"),
        ({"messages": [{"role": "function", "content": "rain"}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call.arguments"),
    ],
)
def test_what_is_wrong_with_functions_is_named(calling: Gateway, fields: dict[str, Any], param: str) -> None:
    assert error_of(calling.chat(**fields))["param"] == param
