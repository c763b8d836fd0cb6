"""The middle of a text: `suffix` in /v1/completions, and llama.cpp's /infill and /completion as editors use them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from alignedserve.core import FinishReason
from alignedserve.owner.client import Delivered
from alignedserve.text.infill import InfillTokens
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, MOST, FakeOwner, Gateway, data_lines, ids_of

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>")
SANTACODER = ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<fim-pad>")
DEEPSEEK = ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>")
CODE_LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
GEEX = ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>")
ASKS = "<|user|>\n###PATH:\n###LANGUAGE:\n###MODE:BLOCK\n"
GLM = (*GEEX, "<think>")
CODESTRAL = ("[PREFIX]", "[SUFFIX]")
FIRST = 2048  # the first id behind the demo model's vocabulary
Make = Callable[..., TextModel]


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Make:
    """Return what makes the demo model's tokenizer with these tokens more, not special ones, as Qwen has them."""

    def made(tokens: Sequence[str], **config: Any) -> TextModel:
        for path in folder.iterdir():
            tree = json.loads(path.read_text())
            if path.name == "tokenizer.json":
                form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
                more = [{"id": FIRST + at, "content": token, **form} for at, token in enumerate(tokens)]
                tree["added_tokens"] += more
            elif path.name == "tokenizer_config.json":
                tree |= config
            elif path.name == "config.json":
                tree["vocab_size"] += len(tokens)
            (tmp_path / path.name).write_text(json.dumps(tree))
        return TextModel.load(tmp_path)

    return made


@pytest.fixture
def qwen(make: Make, hello: tuple[int, ...]) -> Gateway:
    return Gateway(make(QWEN), FakeOwner(hello))


def prompt_of(gateway: Gateway) -> str:
    return gateway.text.decode_all(gateway.owner.opened[-1].prompt)


def infill(gateway: Gateway, **fields: Any) -> Any:
    body = {"input_prefix": "def a():\n", "input_suffix": "\n    return b\n", **fields}
    return gateway.ask("POST", "/infill", json=body)


# --- The prompt of each family


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        (QWEN, "<|fim_prefix|>a =<|fim_suffix|> b<|fim_middle|>"),
        (STARCODER, "<fim_prefix>a =<fim_suffix> b<fim_middle>"),
        (SANTACODER, "<fim-prefix>a =<fim-suffix> b<fim-middle>"),
        (DEEPSEEK, "<\uff5cfim▁begin\uff5c>a =<\uff5cfim▁hole\uff5c> b<\uff5cfim▁end\uff5c>"),
        (CODE_LLAMA, "▁<PRE>a =▁<SUF> b▁<MID>"),
        (GLM, "<|code_prefix|>a =<|code_suffix|> b<|code_middle|>"),
        (CODESTRAL, "[SUFFIX] b[PREFIX]a ="),
        (GEEX, f"{ASKS}<|code_suffix|> b<|code_prefix|>a =<|code_middle|><|assistant|>\n"),
    ],
)
def test_each_family_has_its_tokens_and_their_order(make: Make, tokens: tuple[str, ...], prompt: str) -> None:
    gateway = Gateway(make(tokens), FakeOwner((2,)))
    assert gateway.complete(prompt="a =", suffix=" b").status_code == 200
    (request,) = gateway.owner.opened
    assert request.prompt[0] == 1  # the model's own begin of a text
    assert gateway.text.decode_all(request.prompt[1:]) == prompt
    assert {FIRST + at for at, token in enumerate(tokens) if token != "<think>"} < set(request.stop_tokens)
    assert 2 in request.stop_tokens


def test_a_model_may_name_its_tokens_itself(make: Make) -> None:
    named = {"prefix": "<A>", "suffix": "<B>", "middle": "<C>", "end": "<D>", "file": 7}
    text = make(["<A>", "<B>", "<C>", "<D>"], fim_tokens=named)
    assert text.infill == InfillTokens(
        FIRST, FIRST + 1, FIRST + 2, None, None, (FIRST, FIRST + 1, FIRST + 2, FIRST + 3)
    )
    assert make(["<A>", "<B>"], fim_tokens={**named, "middle": "<X>"}).infill is None
    assert make(QWEN, fim_tokens="no object").infill is not None


def test_no_space_comes_between_a_suffix_and_what_is_filled_in(text: TextModel) -> None:
    """Tokenizers in the way of SentencePiece put a space before each text."""
    words = ["\u2581", "a", "b", "\u263a", "\u2581a", "\u2581b"]
    model = models.BPE({word: id for id, word in enumerate(words)}, [("\u2581", "a"), ("\u2581", "b")])
    spaced = Tokenizer(model)
    spaced.pre_tokenizer = pre_tokenizers.Metaspace()
    with_space, without = replace(text, tokenizer=spaced), text
    assert (with_space.answer_ids("b"), with_space.inner_ids("b"), with_space.inner_ids(" a")) == ([5], [2], [4])
    assert without.answer_ids("b") == without.inner_ids("b")


# --- suffix


def test_a_suffix_is_streamed_and_has_choices_and_log_probabilities(qwen: Gateway) -> None:
    answer = qwen.complete(prompt=["a", [300, 301]], suffix="b", n=2, logprobs=1, stream=True)
    assert data_lines(answer)[-1] == "[DONE]"
    assert len(qwen.owner.opened) == 4
    begins = [request.prompt[:2] for request in qwen.owner.opened[::2]]
    assert begins == [(1, FIRST)] * 2
    assert qwen.owner.opened[2].prompt[2:4] == (300, 301)
    assert {chunk["choices"][0]["index"] for chunk in data_lines(answer)[:-1]} == {0, 1, 2, 3}
    assert data_lines(answer)[0]["choices"][0]["logprobs"]["tokens"]


def test_the_model_s_end_of_a_middle_ends_the_answer(make: Make) -> None:
    text = make(QWEN)
    words = ids_of(text, "Hello")
    for end in range(FIRST, FIRST + len(QWEN)):
        gateway = Gateway(text, FakeOwner((*words, end, 300, 2)))
        (choice,) = gateway.complete(prompt="a", suffix="b").json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Hello", "stop")
    gateway = Gateway(text, FakeOwner((*words, FIRST, 2)))
    gateway.complete(prompt="a", suffix="b", ignore_eos=True, max_tokens=2)
    assert gateway.owner.opened[0].stop_tokens == ()


def test_without_its_begin_a_text_has_the_tokens_alone(qwen: Gateway) -> None:
    qwen.complete(prompt="", suffix="b", add_special_tokens=False)
    assert prompt_of(qwen) == "<|fim_prefix|><|fim_suffix|>b<|fim_middle|>"


@pytest.mark.parametrize("suffix", ["", None])
def test_no_suffix_changes_nothing(qwen: Gateway, suffix: str | None) -> None:
    qwen.complete(prompt="a", suffix=suffix)
    assert qwen.owner.opened[0].prompt == (1, *ids_of(qwen.text, "a"))


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"suffix": 5}, "suffix", "invalid_value"),
        ({"suffix": "b", "echo": True}, "echo", "invalid_value"),
        ({"suffix": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "invalid_value"),
        ({"suffix": "7" * 4 * MOST}, "suffix", "context_length_exceeded"),
        ({"suffix": "b", "prompt": [5] * (MOST - 5)}, "prompt", "context_length_exceeded"),
        ({"suffix": "b " * 300, "prompt": ["a"] * 1000}, "suffix", "too_large"),
    ],
)
def test_what_cannot_go_with_a_suffix_is_refused(make: Make, fields: dict[str, Any], param: str, code: str) -> None:
    longest = 2048 if code == "too_large" else MOST
    answer = Gateway(make(QWEN), FakeOwner((2,)), max_model_len=longest).complete(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["code"] == code


def test_a_model_without_the_tokens_says_so(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner((2,)))
    for answer, field in ((gateway.complete(suffix="b"), "suffix"), (infill(gateway), "input_suffix")):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, field, "unsupported_model")
        assert "cannot fill in the middle" in error["message"]


# --- Mistral's form


def test_mistral_s_clients_get_the_middle_as_a_chat(qwen: Gateway, hello: tuple[int, ...]) -> None:
    """As Continue's provider `mistral` and the package mistralai send it."""
    asked = {"model": MODEL, "prompt": "a =", "suffix": " b", "random_seed": 5, "safe_prompt": False, "stop": ["\n\n"]}
    answer = qwen.ask("POST", "/v1/fim/completions", json=asked)
    body = answer.json()
    (choice,) = body["choices"]
    assert (body["object"], answer.headers["x-ignored-fields"]) == ("chat.completion", "safe_prompt")
    assert (choice["message"], choice["finish_reason"]) == (
        {"role": "assistant", "content": "Hello, naïve 😀!"},
        "stop",
    )
    assert "text" not in choice
    assert body["usage"]["completion_tokens"] == len(hello)
    (request,) = qwen.owner.opened
    assert prompt_of(qwen).endswith("<|fim_prefix|>a =<|fim_suffix|> b<|fim_middle|>")
    assert (request.sampling.seed, request.max_tokens) == (5, MOST - len(request.prompt)), "a middle ends by itself"
    *chunks, done = data_lines(qwen.ask("POST", "/v1/fim/completions", json={**asked, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert ("".join(delta["content"] for delta in deltas), done) == ("Hello, naïve 😀!", "[DONE]")
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    without = qwen.ask("POST", "/v1/fim/completions", json={"model": MODEL, "prompt": "a ="})
    assert without.status_code == 200
    assert qwen.owner.opened[-1].prompt == (1, *ids_of(qwen.text, "a ="))


# --- /infill


VIM = {  # as llama.vim sends it; llama.vscode has the same fields but the last
    "prompt": "    b",
    "n_predict": 64,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1500,
    "response_fields": [
        "content",
        "timings/prompt_n",
        "timings/predicted_ms",
        "truncated",
        "tokens_cached",
        "nothing/x",
    ],
}
FILES = [{"text": "one\n", "time": [1, 2], "filename": "a.py"}, {"text": "two\n", "time": [1, 2]}]


def test_an_editor_gets_the_fields_that_it_asks_for(qwen: Gateway) -> None:
    answer = infill(qwen, **VIM, input_extra=FILES)
    body = answer.json()
    assert body.pop("timings/predicted_ms") >= 0
    (request,) = qwen.owner.opened
    expected = {"content": "Hello, naïve 😀!", "timings/prompt_n": len(request.prompt), "truncated": False}
    assert body == {**expected, "tokens_cached": 0}
    assert answer.headers["x-ignored-fields"] == "n_indent, samplers, cache_prompt, t_max_prompt_ms"
    assert prompt_of(qwen) == (
        "<|begin|><|repo_name|>project\n<|file_sep|>a.py\none\n<|file_sep|>file\ntwo\n<|file_sep|>file\n"
        "<|fim_prefix|>def a():\n<|fim_suffix|>\n    return b\n<|fim_middle|>    b"
    ).replace("<|begin|>", qwen.text.decode_all([1]))
    sampling = request.sampling
    assert (request.max_tokens, sampling.top_k, sampling.top_p) == (64, 40, 0.99)
    assert (sampling.temperature, sampling.min_p) == (0.8, 0.05)


def test_the_whole_answer_has_llama_cpp_s_fields(qwen: Gateway, hello: tuple[int, ...]) -> None:
    body = infill(qwen, return_tokens=True, repeat_penalty=1.1, seed=-1, stop=["\n\n"]).json()
    (request,) = qwen.owner.opened
    assert (body["content"], body["stop"], body["stop_type"], body["stopping_word"]) == (
        "Hello, naïve 😀!",
        True,
        "eos",
        "",
    )
    assert (body["model"], body["tokens"], body["tokens_predicted"]) == (MODEL, [*hello], len(hello))
    assert (body["tokens_evaluated"], body["tokens_cached"]) == (len(request.prompt), 0)
    assert {"prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_per_second"} < body[
        "timings"
    ].keys()
    assert request.sampling.repetition_penalty == 1.1
    assert request.max_tokens == MOST - len(request.prompt)
    infill(qwen, seed=-1)
    assert qwen.owner.opened[0].sampling.seed != qwen.owner.opened[1].sampling.seed


def test_it_says_what_ended_the_answer(qwen: Gateway) -> None:
    word = infill(qwen, stop=["naïve"]).json()
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("Hello, ", "word", "naïve")
    limit = infill(qwen, n_predict=2).json()
    assert (limit["stop_type"], limit["tokens_predicted"]) == ("limit", 2)


def test_a_stream_ends_with_the_whole_answer_but_its_text(qwen: Gateway) -> None:
    *parts, last = data_lines(infill(qwen, stream=True))
    assert "".join(part["content"] for part in parts) == "Hello, naïve 😀!"
    assert not any(part["stop"] for part in parts)
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "eos")
    assert last["timings"]["predicted_n"] == last["tokens_predicted"]


def test_an_editor_warms_the_cache_with_its_files(qwen: Gateway) -> None:
    fields = {
        "input_prefix": "",
        "input_suffix": "",
        "prompt": "",
        "n_predict": 0,
        "samplers": [],
        "response_fields": [""],
    }
    assert infill(qwen, **fields, input_extra=FILES).json() == {}
    assert qwen.owner.opened[0].max_tokens == 1
    whole = infill(qwen, n_predict=0).json()
    assert (whole["content"], whole["tokens_predicted"], whole["stop_type"]) == ("", 0, "limit")


def test_files_that_do_not_fit_are_left_out_the_first_first(qwen: Gateway) -> None:
    files = [{"text": f"{number} " * 30, "filename": f"{number}.py"} for number in range(9)]
    body = infill(qwen, input_extra=files, n_predict=20).json()
    assert body["truncated"]
    assert len(qwen.owner.opened[0].prompt) <= MOST - 20
    shown = [number for number in range(9) if f"{number}.py" in prompt_of(qwen)]
    assert 0 < len(shown) < 9
    assert shown == [*range(9 - len(shown), 9)]
    huge = infill(qwen, input_extra=[{"text": "7" * 100_000}]).json()
    assert huge["truncated"]
    assert "7" not in prompt_of(qwen)


def test_without_tokens_for_files_their_texts_come_first(make: Make) -> None:
    gateway = Gateway(make(STARCODER), FakeOwner((2,)))
    infill(gateway, input_extra=FILES)
    assert prompt_of(gateway).partition("<fim_prefix>")[0].endswith("one\ntwo\n")


class Slow(FakeOwner):
    """Its clock goes on by a second at each look."""

    seconds = 0.0

    def now(self) -> float:
        self.seconds += 1
        return self.seconds


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_takes_too_long_ends_with_its_lines(make: Make, streams: bool) -> None:
    text = make(QWEN)
    line = ids_of(text, "a\n")
    gateway = Gateway(text, Slow((300,), (301,), line, (302,), (303,), (2,)))
    answer = infill(gateway, t_max_predict_ms=500, stream=streams)
    last = data_lines(answer)[-1] if streams else answer.json()
    assert (last["stop_type"], last["tokens_predicted"]) == ("limit", 2 + len(line))
    assert gateway.owner.cancelled == [gateway.owner.opened[0].id]
    assert gateway.metric('alignedserve:request_success_total{finished_reason="length"') == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_extra": "a"}, "input_extra"),
        ({"n_predict": -2}, "n_predict"),
        ({"temperature": -1}, "temperature"),
        ({"no_such": 1}, "no_such"),
        ({"input_prefix": "7" * 4 * MOST}, "input_prefix"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_wrong_is_named(qwen: Gateway, fields: dict[str, Any], param: str) -> None:
    answer = infill(qwen, **fields)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["param"] == param
    assert qwen.owner.opened == []


def test_an_error_amid_a_stream_is_its_last_event(qwen: Gateway) -> None:
    gateway = Gateway(qwen.text, FakeOwner((300,), Delivered((), FinishReason.ERROR)))
    assert data_lines(infill(gateway, stream=True))[-1]["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("body", [{"input_prefix": "a", "input_suffix": "b"}, {"prompt": "a"}])
def test_other_names_mean_what_they_mean_in_all_bodies(qwen: Gateway, body: dict[str, Any]) -> None:
    route = "/infill" if "input_prefix" in body else "/completion"
    left_out = {"dry_multiplier": 0.8, "xtc_threshold": 0.1, "mirostat_tau": 5.0, "lora": [], "n_keep": 5}
    taken = {"repeat_penalty": 1.1, "options": {"top_k": 3}}
    answer = qwen.ask("POST", route, json={**body, **left_out, "min_keep": None} | taken)
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, ", ".join(left_out))
    sampling = qwen.owner.opened[0].sampling
    assert (sampling.repetition_penalty, sampling.top_k) == (1.1, 3)
    for wrong in ({"repeat_penalty": 0}, {"options": {"temprature": 0}}, {"mirostatt": 1}, {"grammar": "odd"}):
        error = qwen.ask("POST", route, json={**body, **wrong}).json()["error"]
        name = next(iter(wrong))
        assert error["param"] == ("options.temprature" if name == "options" else name)


# --- /completion


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [({"json_schema": {"type": "null"}}, "guided_json"), ({"grammar": 'root ::= "yes"'}, "guided_grammar")],
)
def test_a_form_is_demanded_by_llama_cpp_s_name(qwen: Gateway, theirs: dict[str, Any], ours: str) -> None:
    assert qwen.ask("POST", "/completion", json={"prompt": "a", **theirs}).status_code == 200
    assert qwen.complete(**{ours: next(iter(theirs.values()))}).status_code == 200
    first, second = (request.sampling.syntax for request in qwen.owner.opened)
    assert first == second is not None


def test_continue_s_provider_is_answered(text: TextModel, hello: tuple[int, ...]) -> None:
    """It sends null for what its user has not set, and no model."""
    gateway = Gateway(text, FakeOwner(hello))
    fields = {"n_predict": 64, "frequency_penalty": None, "mirostat": None, "min_p": None, "stop": ["\n\n"], "top_k": 3}
    answer = gateway.ask("POST", "/completion", json={"prompt": "Hi", "stream": True, **fields})
    assert "".join(part["content"] for part in data_lines(answer)) == "Hello, naïve 😀!"
    assert gateway.owner.opened[0].prompt == (1, *ids_of(text, "Hi"))
    sampling = gateway.owner.opened[0].sampling
    assert (sampling.top_k, sampling.temperature, sampling.min_p) == (3, 0.8, 0.05)
    assert gateway.ask("POST", "/completion", json={"prompt": [5, 6]}).json()["stop_type"] == "eos"
    assert gateway.owner.opened[1].prompt == (5, 6)
