"""Tests of tools: they are shown to the model, called by choice or by force, and answered by the client."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from alignedserve.gateway.access.keys import ANONYMOUS
from alignedserve.jobs.answering import Answering, LineRequest
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.store.job import Endpoint
from alignedserve.text.call_grammar import can_write
from alignedserve.text.calls.formats import FORMATS, CallFormat
from alignedserve.text.calls.formats import HERMES as HERMES_FORMAT
from alignedserve.text.chat_template import Rendering
from alignedserve.text.syntax import Syntaxes
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, FakeOwner, Gateway, data_lines, ids_of

PARAMETERS = {
    "$defs": {"Place": {"type": "string", "maxLength": 8}},
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/Place"}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = {"tools": [WEATHER, TIME]}
BEGUN = [{"role": "assistant", "content": "x"}]
USER = {"role": "user", "content": "Hi"}
MESSAGES = "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'user' }}|>{{ m.content }}"
TURNS = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
HERMES = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    + MESSAGES
    + "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|end|>"
    + TURNS
)
LLAMA3 = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    + MESSAGES
    + '{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", '
    + '"parameters": {{ c.function.arguments | tojson }}}{% endfor %}<|end|>'
    + TURNS
)
SAID_BY_HERMES = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
SAID_BY_LLAMA3 = '{"name": "weather", "parameters": {"city": "Rom"}}'


PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
MARKER, LONG = "[TOOL_CALLS]", 1024


def model_with(folder: Path, template: str, copy: Path) -> TextModel:
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text(template)
    return TextModel.load(copy)


@pytest.fixture(scope="module")
def hermes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return model_with(folder, HERMES, tmp_path_factory.mktemp("hermes") / "model")


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """Return a model whose template knows no tools."""
    return model_with(folder, PLAIN, tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def special(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """Return a model whose calls begin with a special token."""
    copy = tmp_path_factory.mktemp("special") / "model"
    model_with(folder, HERMES.replace("<tool_call>", MARKER).replace("</tool_call>", "[ARGS]"), copy)
    described = json.loads((copy / "tokenizer.json").read_text())
    for added in described["added_tokens"]:
        added["content"] = MARKER if added["content"] == "<|pad|>" else added["content"]
    described["model"]["vocab"] = {
        MARKER if token == "<|pad|>" else token: number for token, number in described["model"]["vocab"].items()
    }
    (copy / "tokenizer.json").write_text(json.dumps(described))
    return TextModel.load(copy)


@pytest.fixture(scope="module")
def qwen(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """Return a model whose markers are tokens, but not special ones, as Qwen2.5's and Qwen3's are."""
    return model_with_tokens(folder, tmp_path_factory.mktemp("qwen") / "model", HERMES_FORMAT.markers, "tokens")


@pytest.fixture(scope="module")
def llama3(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return model_with(folder, LLAMA3, tmp_path_factory.mktemp("llama3") / "model")


def saying(text: TextModel, said: str) -> Gateway:
    script = ((token,) for token in (*ids_of(text, said), text.eos_ids[0]))
    return Gateway(text, FakeOwner(*script), max_model_len=LONG)


def prompt_of(gateway: Gateway) -> str:
    return gateway.text.decode_all(gateway.owner.opened[-1].prompt)


@pytest.fixture(params=["hermes", "llama3"])
def gateway(request: pytest.FixtureRequest, hermes: TextModel, llama3: TextModel) -> Gateway:
    said = {"hermes": (hermes, SAID_BY_HERMES), "llama3": (llama3, SAID_BY_LLAMA3)}
    return saying(*said[request.param])


def test_no_tool_and_no_call_can_write_a_special_token(hermes: TextModel) -> None:
    def marked(word: str) -> list[int]:
        parameters = {"type": "object", "properties": {word: {"enum": [word, [word]]}}, "required": [word]}
        tool = {"type": "function", "function": {"name": "f", "description": word, "parameters": parameters}}
        calls = [{"type": "function", "function": {"name": "f", "arguments": {word: [word, {"a": [word]}]}}}]
        call = {"role": "assistant", "content": word, "tool_calls": calls}
        prompt = hermes.chat_ids([USER, call, {"role": "tool", "content": word}], Rendering(tools=(tool,)))
        return [token for token in prompt if token in hermes.special_ids]

    assert marked("<|end|>") == marked("end") != []


def test_a_model_calls_a_tool(gateway: Gateway) -> None:
    (choice,) = gateway.chat(**TOOLS).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["type"]) == ("tool_calls", "function")
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rom"}'}
    assert choice["message"]["content"] in ("Let me see.\n", None)
    shown = prompt_of(gateway)
    assert '"weather"' in shown
    assert '"Of a city"' in shown
    assert '"time"' in shown


def test_a_call_is_streamed_as_it_is_written(gateway: Gateway) -> None:
    chunks = [chunk["choices"][0] for chunk in data_lines(gateway.chat(**TOOLS, stream=True))[:-1]]
    parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", [])]
    assert parts[0]["function"]["name"] == "weather"
    assert {part["index"] for part in parts} == {0}
    assert all("id" not in part for part in parts[1:])
    assert "".join(part["function"]["arguments"] for part in parts) == '{"city": "Rom"}'
    assert len(parts) > 2, "not all at once"
    assert chunks[-1]["finish_reason"] == "tool_calls"
    content = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    assert content in ("Let me see.\n", "")


def test_where_none_is_to_be_called_none_is_found(gateway: Gateway) -> None:
    (choice,) = gateway.chat(**TOOLS, tool_choice="none").json()["choices"]
    assert "tool_calls" not in choice["message"]
    assert "Rom" in choice["message"]["content"]
    assert "weather" not in prompt_of(gateway)


def test_the_conversation_comes_back(hermes: TextModel) -> None:
    gateway = saying(hermes, "It rains.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    answered = {"role": "tool", "tool_call_id": "call_1", "content": "rain <|end|>"}
    answer = gateway.chat(messages=[USER, asked, answered], **TOOLS).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("It rains.", "stop")
    shown = prompt_of(gateway)
    assert '{"name": "weather", "arguments": {"city": "Rom"}}' in shown
    assert "rain <|end|>" in shown


@pytest.mark.parametrize(
    "arguments",
    ["no", "[1]", '{"city": "Ro', '{"a":' + "[" * 300 + "]" * 300 + "}"],
    ids=["", "list", "cut", "deep"],
)
def test_a_call_that_comes_back_broken_is_shown_as_it_was_written(hermes: TextModel, arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    gateway = saying(hermes, "x")
    answer = gateway.chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert answer.status_code == 200, answer.text
    assert json.dumps(arguments) in prompt_of(gateway)


def test_a_broken_call_is_shown_where_the_template_knows_no_tools(plain: TextModel) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ro'}}
    gateway = saying(plain, "x")
    assert gateway.chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}], **TOOLS).status_code == 200
    assert json.dumps('{"city": "Ro') in prompt_of(gateway)


def test_a_tool_cannot_write_a_special_token(hermes: TextModel) -> None:
    said = "<|end|>"
    function = {
        "name": "f",
        "description": said,
        "parameters": {"type": "object", "properties": {said: {"const": said}}},
    }
    call = {"id": said, "type": "function", "function": {"name": said, "arguments": json.dumps({said: [said]})}}
    messages = [USER, {"role": "assistant", "content": said, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": said, "content": said})
    gateway = saying(hermes, "x")
    assert gateway.chat(messages=messages, tools=[{"type": "function", "function": function}]).status_code == 200
    prompt = gateway.owner.opened[0].prompt
    assert prompt.count(hermes.eos_ids[0]) == len(messages), "one for each turn"
    assert prompt_of(gateway).count(said) > 2 * len(messages), "as text, it is shown"


def test_several_calls_and_only_one(llama3: TextModel) -> None:
    gateway = saying(llama3, f'{SAID_BY_LLAMA3}; {{"name": "time", "parameters": {{}}}}')
    calls = gateway.chat(**TOOLS).json()["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "time"]
    assert len({call["id"] for call in calls}) == 2
    (only,) = gateway.chat(**TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]["tool_calls"]
    assert only["function"]["name"] == "weather"


ROM: tuple[str, dict[str, Any]] = ("weather", {"city": "Rom"})
NOW: tuple[str, dict[str, Any]] = ("time", {})


_syntaxes = cache(Syntaxes)  # each reads its tokenizer


def follows(gateway: Gateway, written: str) -> bool:
    """Return whether an output may be this text, by the syntax of the request that was opened last."""
    matcher = _syntaxes(gateway.text.trial.folder).matcher(gateway.owner.opened[-1].sampling.syntax)
    ids = list(ids_of(gateway.text, written))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(params=["plain", "hermes", "llama3", "special", "qwen"])
def any_model(request: pytest.FixtureRequest) -> TextModel:
    model: TextModel = request.getfixturevalue(request.param)
    return model


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_may_be_demanded_of_any_model(any_model: TextModel, choice: Any) -> None:
    written = any_model.call_format.write
    gateway = saying(any_model, written([ROM]))
    answer = gateway.chat(**TOOLS, tool_choice=choice, response_format={"type": "json_object"}).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["weather"]
    assert follows(gateway, written([ROM]))
    assert not follows(gateway, written([ROM, NOW, ROM])), "a weak model would never end"
    gateway.chat(**TOOLS, tool_choice=choice, parallel_tool_calls=True)
    assert follows(gateway, written([ROM, NOW, ROM])) is (choice == "required")
    broken = [written([("odd", {})]), written([("weather", {"city": 5})]), "Let me see.", '{"city": "Rom"}']
    assert not any(follows(gateway, text) for text in broken)


@pytest.fixture(scope="module", params=["special tokens", "tokens", "text"])
def families(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """Return a model with the markers of all formats, which published tokenizers have as special tokens (Mistral,
    gpt-oss), as other tokens (Qwen, GLM, DeepSeek), or as no tokens."""
    markers = [marker for form in FORMATS for marker in form.markers if re.fullmatch(r"<.*>|\[.*\]", marker)]
    return model_with_tokens(folder, tmp_path_factory.mktemp("families") / "model", markers, request.param)


def model_with_tokens(folder: Path, copy: Path, markers: Sequence[str], kind: str) -> TextModel:
    model_with(folder, HERMES, copy)
    described = json.loads((copy / "tokenizer.json").read_text())
    usual, vocabulary = described["added_tokens"][0], described["model"]["vocab"]
    new = [marker for marker in dict.fromkeys(markers) if marker not in vocabulary and kind != "text"]
    for id, marker in enumerate(new, len(vocabulary)):
        added = {"id": id, "content": marker, "special": kind == "special tokens"}
        described["added_tokens"].append({**usual, **added})
    (copy / "tokenizer.json").write_text(json.dumps(described))
    text = TextModel.load(copy)
    assert kind == "text" or all(len(text.answer_ids(marker)) == 1 for marker in markers)
    return text


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name}-{type(form.layout).__name__}")
def test_a_call_may_be_demanded_in_every_format(families: TextModel, form: CallFormat) -> None:
    model = replace(families, call_format=form)
    functions = {"weather": PARAMETERS, "time": {"type": "object", "properties": {}, "additionalProperties": False}}
    written = (form if can_write(form, functions) else HERMES_FORMAT).write
    for parallel, said, heard in ((None, [ROM, NOW], [ROM]), (True, [ROM, NOW, ROM, NOW], [ROM, NOW])):
        gateway = saying(model, written(said))
        answer = gateway.chat(**TOOLS, tool_choice="required", parallel_tool_calls=parallel)
        called, finish = _calls_of(answer, is_streamed=False)
        assert ([(name, json.loads(arguments)) for name, arguments in called], finish) == (heard, "tool_calls")
        assert answer.json()["choices"][0]["message"]["content"] is None
        assert follows(gateway, written([ROM]))
        assert follows(gateway, written([ROM, NOW, ROM])) is (parallel is True)
        assert not any(follows(gateway, text) for text in (written([("odd", {})]), "Let me see.", '{"city": "Rom"}'))


def test_demanded_calls_end(any_model: TextModel) -> None:
    """A weak model goes on calling until its tokens are used up."""
    cities = [("weather", {"city": f"City {number}"}) for number in range(20)]
    several = {**TOOLS, "tool_choice": "required", "parallel_tool_calls": True, "max_tokens": 2 * LONG}
    cases = [([ROM, NOW, ROM, NOW], [ROM, NOW]), ([*cities[:2], cities[0], NOW], cities[:2]), (cities, cities[:16])]
    for written, heard in cases:
        said = ids_of(any_model, any_model.call_format.write(written))
        for is_streamed in (False, True):
            owner = FakeOwner(*((token,) for token in said))
            answer = Gateway(any_model, owner, max_model_len=4 * LONG).chat(**several, stream=is_streamed)
            called, finish = _calls_of(answer, is_streamed)
            assert (called, finish) == ([(name, json.dumps(arguments)) for name, arguments in heard], "tool_calls")
            assert owner.cancelled, "with the last call the answer ends"


def test_calls_by_choice_end_too(any_model: TextModel) -> None:
    """A weak model repeats its call, and an agent would do the same thing again and again."""
    several: list[tuple[str, Any]] = [("weather", {"city": f"City {number}"}) for number in range(130)]
    for written, heard in (([ROM, NOW, ROM, NOW], [ROM, NOW]), (several, several[:128])):
        owner = FakeOwner(*((token,) for token in ids_of(any_model, any_model.call_format.write(written))))
        answer = Gateway(any_model, owner, max_model_len=1 << 14).chat(**TOOLS, max_tokens=1 << 13)
        called, finish = _calls_of(answer, is_streamed=False)
        assert ([(name, json.loads(arguments)) for name, arguments in called], finish) == (heard, "tool_calls")
        assert owner.cancelled


def _calls_of(answer: Any, is_streamed: bool) -> tuple[list[tuple[str, str]], str]:
    if not is_streamed:
        (choice,) = answer.json()["choices"]
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        return [(function["name"], function["arguments"]) for function in functions], choice["finish_reason"]
    chunks = [chunk["choices"][0] for chunk in data_lines(answer)[:-1]]
    called = list[tuple[str, str]]()
    for part in (part for chunk in chunks for part in chunk["delta"].get("tool_calls", [])):
        if "id" in part:
            called.append((part["function"]["name"], ""))
        name, arguments = called[part["index"]]
        called[part["index"]] = name, arguments + part["function"].get("arguments", "")
    return called, chunks[-1]["finish_reason"]


@pytest.mark.parametrize("said", ['<tool_call>\n{"name": "wea', '\n<tool_call>\n{"na', "\n<tool"])
def test_a_demanded_call_that_is_cut_off_before_its_name_is_no_text(hermes: TextModel, said: str) -> None:
    before = "" if said.startswith("<") else hermes.call_format.write([ROM])
    ids = ids_of(hermes, before + said)
    demanded = {**TOOLS, "tool_choice": "required", "parallel_tool_calls": True, "max_tokens": len(ids)}
    for is_streamed in (False, True):
        gateway = Gateway(hermes, FakeOwner(*((token,) for token in ids)), max_model_len=LONG)
        asked = gateway.chat(**demanded, stream=is_streamed)
        if is_streamed:
            chunks = [chunk["choices"][0] for chunk in data_lines(asked)[:-1]]
            assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == ""
            assert chunks[-1]["finish_reason"] == "length"
        else:
            (choice,) = asked.json()["choices"]
            assert (choice["finish_reason"], choice["message"]["content"] or "") == ("length", "")
            assert len(choice["message"].get("tool_calls", [])) == bool(before)


SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def test_an_answer_may_be_a_call_or_follow_a_schema(any_model: TextModel) -> None:
    written = any_model.call_format.write
    calling, answering = saying(any_model, written([ROM])), saying(any_model, '{"answer": 5}')
    for gateway in (calling, answering):
        assert gateway.chat(**TOOLS, response_format=ANSWER).status_code == 200
        assert [follows(gateway, text) for text in (written([ROM]), written([ROM, NOW]), '{"answer": 5}')] == [True] * 3
        assert not any(follows(gateway, text) for text in ("Hi", '{"answer": "x"}', written([("odd", {})])))
    message = calling.chat(**TOOLS, response_format=ANSWER).json()["choices"][0]["message"]
    assert (message["content"], message["tool_calls"][0]["function"]["name"]) == (None, "weather")
    message = answering.chat(**TOOLS, response_format=ANSWER).json()["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == ('{"answer": 5}', None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{**TIME, "type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [TIME] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({**TOOLS, "tool_choice": {"type": "function", "function": {"name": "odd"}}}, "tool_choice"),
        ({**TOOLS, "tool_choice": "odd"}, "tool_choice"),
        ({**TOOLS, "structured_outputs": {"regex": "a"}}, "tools"),
        ({**TOOLS, "tool_choice": "required", "ignore_eos": True}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tool_choice",
        ),
    ],
)
def test_a_wrong_field_is_named(hermes: TextModel, fields: dict[str, Any], param: str) -> None:
    answer = saying(hermes, "x").chat(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_schema_with_a_name_is_told_from_a_call(llama3: TextModel) -> None:
    gateway = saying(llama3, '{"name": "weather", "parameters": {}}')
    message = gateway.chat(**TOOLS, response_format={"type": "json_object"}).json()["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == ('{"name": "weather", "parameters": {}}', None)
    assert follows(gateway, '{"name": "Ann"}')
    assert follows(gateway, HERMES_FORMAT.write([ROM]))


def test_a_model_whose_template_knows_no_tools_calls_them_all_the_same(plain: TextModel) -> None:
    written = plain.call_format.write([ROM])
    gateway = saying(plain, f"Let me see. {written}")
    (choice,) = gateway.chat(**TOOLS).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rom"}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me see. ", "tool_calls")
    assert '"Of a city"' in prompt_of(gateway)
    possible = ["", "It rains.", f"Let me see. {written}", f"{written}\n{written}", "<tool"]
    assert all(follows(gateway, said) for said in possible)
    assert not any(follows(gateway, said) for said in ("<tool_call> so", "<tool_call>\n{}", f"{written}<tool_call>\n1"))
    gateway.chat(**TOOLS, parallel_tool_calls=False)
    assert not follows(gateway, f"{written}\n{written}")


def test_a_line_of_a_batch_calls_too(plain: TextModel) -> None:
    owner = FakeOwner((*ids_of(plain, plain.call_format.write([ROM])), plain.eos_ids[0]))
    answering = Answering(owner, plain, (MODEL,), LONG, RequestMetrics())
    body = {"model": MODEL, "messages": [USER], **TOOLS}
    line = LineRequest("line-1", Endpoint.CHAT, body, 60.0, None, ANONYMOUS)
    (choice,) = asyncio.run(answering.answer(line, lambda: None))["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rom"}'}


def test_it_is_told_what_was_called_and_what_came_of_it(plain: TextModel) -> None:
    gateway = saying(plain, "It rains.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    asked = {"role": "assistant", "content": "So:", "tool_calls": [call]}
    answered = {"role": "tool", "tool_call_id": "call_1", "content": "rain <|end|>"}
    system = {"role": "system", "content": "Be brief."}
    answer = gateway.chat(messages=[system, USER, asked, answered], **TOOLS).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("It rains.", "stop")
    shown = prompt_of(gateway)
    assert shown.count("<|system|>") == 1
    assert "Be brief.\n\n# Tools" in shown
    assert f"So:\n{plain.call_format.write([ROM])}" in shown
    assert "<|user|><tool_response>\nrain <|end|>\n</tool_response>" in shown


def test_a_template_without_system_messages_has_the_tools_with_the_user(folder: Path, tmp_path: Path) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + MESSAGES + TURNS
    gateway = saying(model_with(folder, strict, tmp_path / "model"), "x")
    assert gateway.chat(**TOOLS).status_code == 200
    assert '"weather"' in prompt_of(gateway)


def test_a_schema_that_no_grammar_has_stops_no_agent(plain: TextModel) -> None:
    odd: dict[str, Any] = {"type": "function", "function": {"name": "odd", "parameters": {"not": {}}}}
    gateway = saying(plain, plain.call_format.write([("odd", {"a": 1})]))
    answer = gateway.chat(tools=[odd]).json()["choices"][0]
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "odd", "arguments": '{"a": 1}'}
    odd["function"]["strict"] = True
    assert gateway.chat(tools=[odd]).json()["error"]["param"] == "tools"


def test_arguments_are_texts_where_a_template_needs_them(folder: Path, tmp_path: Path) -> None:
    joined = HERMES.replace("c.function | tojson", "c.function.name + c.function.arguments")
    gateway = saying(model_with(folder, joined, tmp_path / "model"), "x")
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert gateway.chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}]).status_code == 200
    assert 'f{"a": 1}' in prompt_of(gateway)


def test_markers_that_are_special_tokens_are_read_and_not_shown(special: TextModel) -> None:
    said = special.call_format.write([ROM])
    message = saying(special, f"So. {said}").chat(**TOOLS).json()["choices"][0]["message"]
    assert (message["content"], message["tool_calls"][0]["function"]["name"]) == ("So. ", "weather")
    assert re.fullmatch("[a-z0-9]{9}", message["tool_calls"][0]["id"]), "which is all that such templates take"
    message = saying(special, f"No {MARKER} call").chat(**TOOLS).json()["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == ("No  call", None)


def test_ids_from_elsewhere_become_such_as_the_template_takes(folder: Path, tmp_path: Path) -> None:
    checks = (
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids') }}{% endif %}"
        "<{{ c.id }}>{% endfor %}{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}{{ tools }}{# [TOOL_CALLS] #}"
    )
    gateway = saying(model_with(folder, MESSAGES + checks + TURNS, tmp_path / "model"), "x")
    call = {"id": "call_<|end|>", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answered = {"role": "tool", "tool_call_id": call["id"], "content": "x"}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, answered]
    assert gateway.chat(messages=messages).status_code == 200
    ids = re.findall("<([a-z0-9]{9})>", prompt_of(gateway))
    assert len(ids) == 2
    assert len({*ids}) == 1


def test_the_answer_ends_with_the_only_call(hermes: TextModel) -> None:
    said = hermes.call_format.write([ROM, NOW])
    (shorter, longer) = (len(ids_of(hermes, hermes.call_format.write(calls))) for calls in ([ROM], [ROM, NOW]))
    for gateway in (saying(hermes, said), Gateway(hermes, FakeOwner(ids_of(hermes, said)), max_model_len=LONG)):
        answer = gateway.chat(**TOOLS, parallel_tool_calls=False).json()
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert answer["usage"]["completion_tokens"] <= shorter < longer
    assert gateway.owner.cancelled


def test_a_format_may_be_named(folder: Path, tmp_path: Path) -> None:
    model_with(folder, HERMES, tmp_path / "model")
    named = TextModel.load(tmp_path / "model", tool_call_parser="llama3_json")
    message = saying(named, SAID_BY_LLAMA3).chat(**TOOLS).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "weather"


def test_schemas_that_bind_hold_wherever_a_grammar_can(hermes: TextModel, llama3: TextModel) -> None:
    function = {"name": "weather", "parameters": PARAMETERS, "strict": True}
    strict = {"tools": [{"type": "function", "function": function}]}
    gateway = saying(hermes, "x")
    assert "x-ignored-fields" not in gateway.chat(**strict).headers
    assert follows(gateway, f"See: {hermes.call_format.write([ROM])}")
    assert not follows(gateway, hermes.call_format.write([("weather", {"city": 5})]))
    gateway = saying(llama3, "x")
    assert "x-ignored-fields" not in gateway.chat(**strict).headers
    for calls in ([ROM], [ROM, ROM]):
        assert follows(gateway, llama3.call_format.write(calls))
    for text in ("It rains.", "", " I say: {5}", "[5]"):
        assert follows(gateway, text)
    for call in ({"city": 5}, {"city": "Rom", "x": 1}):
        assert not follows(gateway, llama3.call_format.write([("weather", call)]))
    for text in ('\n{"name": 5}', '[ {"a": 1}]', 'So: <|python_tag|>{"name": "weather", "parameters": {"city": 5}}'):
        assert not follows(gateway, text)


def test_strict_is_named_where_no_grammar_says_a_call(folder: Path, tmp_path: Path) -> None:
    model_with(folder, HERMES, tmp_path / "model")
    function = {"name": "weather", "parameters": PARAMETERS, "strict": True}
    strict = {"tools": [{"type": "function", "function": function}]}
    gateway = saying(TextModel.load(tmp_path / "model", tool_call_parser="pythonic"), "x")
    assert gateway.chat(**strict).headers["x-ignored-fields"] == "tools.function.strict"
    assert "x-ignored-fields" not in gateway.chat(**strict, tool_choice="required").headers


# --- Other fields of the prompt


def test_the_last_message_may_be_gone_on_with(hermes: TextModel) -> None:
    gateway = saying(hermes, "x")
    begun = [USER, {"role": "assistant", "content": "It is <|end|> "}]
    asked = {"messages": begun, "add_generation_prompt": False}
    assert gateway.chat(**asked, continue_final_message=True).status_code == 200
    assert prompt_of(gateway).endswith("It is <|end|>")
    assert gateway.owner.opened[-1].prompt.count(hermes.eos_ids[0]) == 1, "that of the user's turn"
    gateway.chat(**asked)
    assert prompt_of(gateway).endswith("It is <|end|> <|end|>")


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {
            "continue_final_message": True,
            "messages": [{"role": "assistant", "content": "x"}],
            "add_generation_prompt": True,
        },
    ],
)
def test_otherwise_it_cannot(hermes: TextModel, fields: dict[str, Any]) -> None:
    assert saying(hermes, "x").chat(**fields).json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_last_message_cannot_be_gone_on_with(hermes: TextModel, content: str) -> None:
    """It was a 500 with a stack in the log, and so were the routes of Anthropic, which need no flag."""
    gateway = saying(hermes, "x")
    begun = {"messages": [USER, {"role": "assistant", "content": content}]}
    asked = {**begun, "continue_final_message": True, "add_generation_prompt": False}
    for answer in (
        gateway.chat(**asked),
        gateway.ask("POST", "/v1/messages", json={"model": MODEL, "max_tokens": 4, **begun}),
        gateway.ask("POST", "/v1/messages/count_tokens", json={"model": MODEL, **begun}),
    ):
        assert answer.status_code == 400, answer.text
        assert "empty" in answer.json()["error"]["message"]


def test_a_template_is_given_what_it_knows(folder: Path, tmp_path: Path) -> None:
    text = model_with(folder, "{{ mood }}{{ deep.a[0] }}{{ messages[0].content }}", tmp_path / "model")
    gateway = saying(text, "x")
    kwargs = {"mood": "gay <|end|>", "deep": {"a": ["<|end|>"]}}
    assert gateway.chat(chat_template_kwargs=kwargs).status_code == 200
    assert prompt_of(gateway) == "gay <|end|><|end|>Hi"
    assert text.eos_ids[0] not in gateway.owner.opened[0].prompt


def test_variables_that_a_template_does_not_read_are_left_out(text: TextModel) -> None:
    gateway = saying(text, "x")
    answer = gateway.chat(chat_template_kwargs={"enable_thinking": False, "add_generation_prompt": True})
    assert answer.headers["x-ignored-fields"] == "chat_template_kwargs.enable_thinking"
    many = {f"v{number}": 1 for number in range(2000)} | {"a\r\nset-cookie: b": 1}
    names = [gateway.chat(chat_template_kwargs=given) for given in (many, {"ü,\r": 1})]
    assert [len(answer.headers["x-ignored-fields"].split(", ")) for answer in names] == [16, 1]
    assert names[1].headers["x-ignored-fields"] == "chat_template_kwargs"
    gateway.chat()
    assert len({request.prompt for request in gateway.owner.opened}) == 1
    body = {"messages": [USER], "chat_template_kwargs": {"odd": 1}}
    answer = gateway.ask("POST", "/tokenize", json=body)
    assert answer.headers["x-ignored-fields"] == "chat_template_kwargs.odd"


def test_a_prompt_may_be_cut_to_its_end(text: TextModel) -> None:
    gateway = saying(text, "x")
    gateway.complete(prompt=[5, 6, 7, 8], truncate_prompt_tokens=2)
    gateway.complete(prompt="Hi", add_special_tokens=False)
    assert [request.prompt for request in gateway.owner.opened] == [(7, 8), ids_of(text, "Hi")]


def test_special_tokens_may_be_shown(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner((5, *ids_of(text, "Hi"), 2)))
    shown, usual = (gateway.complete(skip_special_tokens=skip).json()["choices"][0]["text"] for skip in (False, True))
    assert (shown, usual) == ("<|assistant|>Hi", "Hi")


def test_what_changes_nothing_is_told(text: TextModel) -> None:
    gateway = saying(text, "x")
    fields = {"store": True, "prompt_cache_key": "a", "safety_identifier": "b", "prediction": None}
    for stream in (False, True):
        told = gateway.chat(**fields, stream=stream).headers["x-ignored-fields"]
        assert told == "prompt_cache_key, safety_identifier, store"
    assert "x-ignored-fields" not in gateway.chat(store=False).headers


# --- Fields of messages that only some templates read

TELLING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.name }}: {{ m.reasoning_content }}: {{ m.content }}{% endfor %}"
    "{{ reasoning_effort }}<|assistant|>"
)
TOLD = [
    {**USER, "name": "Ann"},
    {"role": "assistant", "content": None, "refusal": "No", "reasoning": "Hm", "annotations": []},
    USER,
]


def test_a_template_that_reads_them_gets_them(folder: Path, tmp_path: Path) -> None:
    gateway = saying(model_with(folder, TELLING, tmp_path / "model"), "x")
    answer = gateway.chat(messages=TOLD, reasoning_effort="low")
    assert prompt_of(gateway) == "<|user|>Ann: : Hi<|assistant|>: Hm: No<|user|>: : Hilow<|assistant|>"
    assert "x-ignored-fields" not in answer.headers


def test_else_they_are_named_and_change_nothing(text: TextModel) -> None:
    gateway = saying(text, "x")
    told = [*TOLD, {"role": "assistant", "content": "x", "annotations": [{"type": "url_citation"}]}, USER]
    answer = gateway.chat(messages=told, reasoning_effort="low", verbosity="high")
    ignored = "messages.annotations, reasoning_effort, verbosity, messages.name, messages.reasoning"
    assert answer.headers["x-ignored-fields"] == ignored
    plain = [USER, {"role": "assistant", "content": "No"}, USER, {"role": "assistant", "content": "x"}, USER]
    assert "x-ignored-fields" not in gateway.chat(messages=plain).headers
    assert gateway.owner.opened[0].prompt == gateway.owner.opened[1].prompt


def test_an_answer_may_be_sent_back_as_it_came(text: TextModel) -> None:
    """An answer that ended while it reasoned has no content, and a refusal may be a part of one."""
    gateway = saying(text, "x")
    cut_off = {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "Hm"}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}
    marked = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
    assert gateway.chat(messages=[USER, cut_off, USER, refused, marked]).status_code == 200
    said = [USER, {"role": "assistant", "content": ""}, USER, {"role": "assistant", "content": "No"}, USER]
    gateway.chat(messages=said)
    assert gateway.owner.opened[0].prompt == gateway.owner.opened[1].prompt


def allowing(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


def test_allowed_tools_are_those_that_there_are(gateway: Gateway) -> None:
    gateway.chat(**TOOLS, **allowing("auto", "time"))
    gateway.chat(tools=[TIME])
    gateway.chat(**TOOLS, **allowing("required", "time"))
    gateway.chat(tools=[TIME], tool_choice="required")
    opened = [(request.prompt, request.sampling.syntax) for request in gateway.owner.opened]
    assert opened[0] == opened[1]
    assert opened[2] == opened[3]
    for name, param in (("other", "tool_choice"), ("no name", "tool_choice.allowed_tools.tools[0].function.name")):
        assert gateway.chat(**TOOLS, **allowing("auto", name)).json()["error"]["param"] == param
