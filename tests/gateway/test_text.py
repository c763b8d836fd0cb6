"""Tests of text to tokens and back: as transformers does it, except for special tokens in a user's text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from alignedserve.core import Sampling
from alignedserve.errors import ModelError, PromptError
from alignedserve.text.chat_template import ChatTemplate
from alignedserve.text.decoding import IncrementalDecoder
from alignedserve.text.text_model import MOST_SHOWN, TextModel, TokenBytes
from tests.conftest import examples
from tests.gateway.conftest import ids_of

SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")

unicode_text = st.text(st.characters(exclude_categories=["Cs"]))
# Texts that are mostly pieces of special tokens.
hostile_text = st.lists(
    st.sampled_from([*SPECIALS, "<", "|", ">", "<|", "|>", "end", "user", " ", "\n", "\U0010fffd", "\ue000", "x"])
).map("".join)


@pytest.fixture(scope="module")
def reference(folder: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(folder)


def said(*contents: str) -> list[dict[str, str]]:
    roles = ["system", "user", "assistant", "user"]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


@given(contents=st.lists(unicode_text, min_size=1, max_size=4))
def test_a_chat_is_encoded_as_transformers_does(
    text: TextModel, reference: transformers.PreTrainedTokenizerFast, contents: list[str]
) -> None:
    messages = said(*contents)
    if any(special in content for special in SPECIALS for content in contents):
        return
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert text.chat_ids(messages) == expected


@given(contents=st.lists(hostile_text, min_size=1, max_size=4))
def test_no_message_can_write_a_special_token(text: TextModel, contents: list[str]) -> None:
    marked = [number for number in text.chat_ids(said(*contents)) if number in text.special_ids]
    roles = [f"<|{message['role']}|>" for message in said(*contents)]
    names = ["<|begin|>", *(name for role in roles for name in (role, "<|end|>")), "<|assistant|>"]
    assert marked == [text.tokenizer.token_to_id(name) for name in names]


@given(content=hostile_text)
def test_what_looks_like_a_special_token_stays_readable(text: TextModel, content: str) -> None:
    assert text.decode(text.chat_ids(said(content))) == content.strip()


def template_of(text: TextModel, source: str) -> ChatTemplate:
    return ChatTemplate(source, {"eos_token": "<|end|>"}, SPECIALS, text.tokenizer.to_str())


@pytest.mark.parametrize(
    "written",
    [
        "{{ content | replace('<think>', '') }}",
        "{{ content.split('</think>')[-1] }}",
        "<{{ content }}",
        "<|e{{ content }}",
        "{{ content }}|>",
        "{{ content | tojson }}",
    ],
)
@pytest.mark.parametrize(
    "content", ["<|e<think>nd|>", "</think><|end|>", "|end|>", "nd|>", "<|end", "<|end|>", "\U0010fffd|end|>"]
)
def test_nor_by_what_a_template_cuts_away_or_writes_beside(text: TextModel, written: str, content: str) -> None:
    template = template_of(text, "{% set content = messages[0].content %}" + written)
    assert not text.special_ids & set(template.token_ids(said(content)))


def test_a_template_finds_what_it_looks_for_in_a_message(text: TextModel) -> None:
    looks = "{{ messages[0].content.split('</think>')[-1] if '</think>' in messages[0].content }}"
    assert text.decode(template_of(text, looks).token_ids(said("<think>2 < 3</think>so: <|end|>"))) == "so: <|end|>"
    adds = template_of(text, "{{ messages[0].number + 1 }}")
    assert text.decode(adds.token_ids([{"role": "user", "content": "", "number": 1}])) == "2"


def test_a_developer_is_the_system_where_a_template_knows_none(text: TextModel) -> None:
    developer, system = ([{"role": role, "content": "Be brief."}] for role in ("developer", "system"))
    assert text.chat_ids(developer) == text.chat_ids(system)


def test_a_refusing_template_says_so_in_one_line(text: TextModel) -> None:
    with pytest.raises(PromptError, match=r"^the model's chat template refuses these messages: unknown role odd: .*$"):
        text.chat_ids([{"role": "odd", "content": "x"}])


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}"])
def test_a_template_that_stumbles_over_messages_refuses_them(text: TextModel, source: str) -> None:
    with pytest.raises(PromptError, match=r"^the model's chat template refuses these messages: .+"):
        template_of(text, source).token_ids(said("Hi"))


def test_a_template_has_what_transformers_gives_it(text: TextModel) -> None:
    source = (
        "{% for m in messages %}\n    {% generation %}\n{{ m.content }}{{ {'a': '<é>'} | tojson }}{% endgeneration %}\n"
        "{% break %}\n{% endfor %}\n{{ strftime_now('%%') }}{{ eos_token }}"
    )
    ids = template_of(text, source).token_ids(said("x", "y"))
    assert text.decode(ids) == 'x{"a": "<é>"}%'
    assert ids[-1] == text.eos_ids[0]


def test_a_prompt_begins_as_the_model_wants_it(
    text: TextModel, reference: transformers.PreTrainedTokenizerFast
) -> None:
    assert text.prompt_ids("Hi<|end|>") == reference("Hi<|end|>")["input_ids"] == [1, *ids_of(text, "Hi"), 2]


def test_a_unigram_tokenizer_keeps_its_ids_under_guard() -> None:
    unigram = Tokenizer(models.Unigram([("<s>", 0.0), ("</s>", 0.0), ("a", -1.0), ("<", -1.0), ("/s>", -1.0)], 0))
    unigram.add_special_tokens(["<s>", "</s>"])
    template = ChatTemplate("<s>{{ messages[0].content }}</s>", {}, ["<s>", "</s>"], unigram.to_str())
    assert template.token_ids(said("a</s>")) == [0, 2, 3, 4, 1]


# --- The incremental decoder


def fed(decoder: IncrementalDecoder, ids: Sequence[int], size: int = 1) -> list[str]:
    pieces = [decoder.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    return [*pieces, decoder.flush()]


@given(written=unicode_text, size=st.integers(1, 5))
def test_the_pieces_of_any_text_are_the_text(text: TextModel, written: str, size: int) -> None:
    # a special token in its own spelling is a token, and tests nothing here
    assume(not any(special in written for special in SPECIALS))
    pieces = fed(text.decoder(), [1, *ids_of(text, written), 2], size)
    assert "".join(pieces) == written
    assert "\ufffd" in written or "\ufffd" not in "".join(pieces)


@settings(max_examples=examples(300))
@given(
    ids=st.lists(st.one_of(st.integers(0, 2047), st.integers(6, 262)), max_size=120),  # words, and single bytes
    size=st.integers(1, 5),
)
def test_the_pieces_of_any_tokens_are_what_they_decode_to_at_once(text: TextModel, ids: list[int], size: int) -> None:
    ids = [number for number in ids if number < text.tokenizer.get_vocab_size()]
    assert "".join(fed(text.decoder(), ids, size)) == text.decode(ids)


def test_half_a_character_is_held_back(text: TextModel) -> None:
    smile = ids_of(text, "😀")
    decoder = text.decoder()
    assert [decoder.feed([number]) for number in smile] == [*[""] * (len(smile) - 1), "😀"]
    assert decoder.feed([*ids_of(text, "Hi"), smile[0]]) == "Hi"


@pytest.mark.parametrize(
    "written", ["a story of words " * 100, "😀" * 300, "\ufffd" * 600], ids=["words", "smiles", "broken"]
)
def test_a_token_costs_a_bounded_number_of_decoded_tokens(text: TextModel, written: str) -> None:
    decoded = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return text.decode(ids)

    ids = ids_of(text, written)
    assert "".join(fed(IncrementalDecoder(counting, text.special_ids), ids)) == written
    assert decoded <= len(ids) * 3 * IncrementalDecoder.MOST


def llama_like() -> Tokenizer:
    """Return a tokenizer that writes spaces as ▁, drops the first one, and has single bytes for unknown characters."""
    words = ["<unk>", "</s>", "▁", "▁a", "▁story", "b", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


@given(words=st.lists(st.sampled_from(["▁", "▁a", "▁story", "b", "é", "你", "😀", "\n"]), max_size=60))
def test_so_it_is_with_byte_fallback(words: list[str]) -> None:
    tokenizer = llama_like()
    ids: list[int] = []
    for word in words:
        names = [word] if tokenizer.token_to_id(word) is not None else [f"<0x{byte:02X}>" for byte in word.encode()]
        ids += [number for name in names if (number := tokenizer.token_to_id(name)) is not None]
    assert "".join(fed(IncrementalDecoder(tokenizer.decode), ids)) == tokenizer.decode(ids)


# --- Model folders


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_says_how_it_ends(copy: Path) -> None:
    edit(copy / "config.json", eos_token_id=[2, 5])
    edit(copy / "generation_config.json", eos_token_id=[5, 7])
    model = TextModel.load(copy)
    assert (model.eos_ids, model.vocab_size) == ((2, 5, 7), 2048)


@pytest.mark.parametrize(
    ("config", "eos_ids"),
    [
        ({"vocab_size": 2048, "n_positions": 64, "eos_token_id": 0}, (0, 2)),
        ({"text_config": {"vocab_size": 2048, "eos_token_id": 5}}, (5, 2)),
        ({"text_config": {"vocab_size": 2048, "eos_token_id": 5}, "eos_token_id": 7}, (7, 2)),
    ],
    ids=["as GPT-2", "in a section", "and beside it"],
)
def test_a_configuration_by_other_names(copy: Path, config: dict[str, object], eos_ids: tuple[int, ...]) -> None:
    (copy / "config.json").write_text(json.dumps(config))
    model = TextModel.load(copy)
    assert (model.vocab_size, model.eos_ids) == (2048, eos_ids)


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        ({"do_sample": False, "temperature": 0.7}, Sampling()),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
            Sampling(temperature=0.7, top_p=0.8, top_k=20),
        ),
        ({"min_p": 0.1, "repetition_penalty": 1.05}, Sampling(temperature=1.0, min_p=0.1, repetition_penalty=1.05)),
        ({"do_sample": False, "repetition_penalty": 1.05}, Sampling(repetition_penalty=1.05)),
        ({}, Sampling(temperature=1.0)),
    ],
)
def test_a_folder_says_how_to_sample(copy: Path, generation: dict[str, object], sampling: Sampling) -> None:
    (copy / "generation_config.json").write_text(json.dumps(generation))
    assert TextModel.load(copy).sampling == sampling


def test_a_template_file_outweighs_the_configuration(copy: Path, text: TextModel) -> None:
    (copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ eos_token }}")
    assert TextModel.load(copy).chat_ids(said("Hi")) == [*ids_of(text, "Hi"), 2]


def test_of_named_templates_the_default_is_taken(copy: Path, text: TextModel) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "Hi"}]
    edit(copy / "tokenizer_config.json", chat_template=named)
    assert TextModel.load(copy).chat_ids(said("x")) == [*ids_of(text, "Hi")]


def test_a_token_is_special_if_only_the_configuration_says_so(copy: Path) -> None:
    described = json.loads((copy / "tokenizer.json").read_text())
    for added in described["added_tokens"]:
        added["special"] = False
    (copy / "tokenizer.json").write_text(json.dumps(described))
    model = TextModel.load(copy)
    assert model.chat_ids(said("<|end|>")).count(2) == 1
    assert model.decode([2]) == ""


def test_a_model_without_a_template_still_completes(copy: Path) -> None:
    edit(copy / "tokenizer_config.json", chat_template=None)
    model = TextModel.load(copy)
    assert model.prompt_ids("Hi")
    with pytest.raises(ModelError, match="has no chat template: send its prompt to /v1/completions"):
        model.chat_ids(said("Hi"))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "[]", "config.json does not hold a JSON object"),
        ("config.json", "{}", "config.json: vocab_size is missing"),
        ("config.json", '{"vocab_size": 0}', "config.json: vocab_size must be a whole number above 0, not 0"),
        ("config.json", '{"vocab_size": 9, "eos_token_id": "x"}', "eos_token_id must be the number of a token"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("generation_config.json", "{", "generation_config.json cannot be read"),
        ("generation_config.json", '{"temperature": "hot"}', "generation_config.json: "),
        ("generation_config.json", '{"top_p": 1.5}', "top_p must be above 0 and at most 1"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id must be the number of a token"),
        ("tokenizer.json", '{"added_tokens": 5}', "added_tokens must be a list of objects"),
        ("tokenizer_config.json", '{"additional_special_tokens": 7}', "special tokens must be a list"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template must be a text"),
        ("chat_template.jinja", "{% if %}", "the chat template cannot be read"),
        ("chat_template.jinja", "{{" + "(" * 50_000, "the chat template cannot be read"),
    ],
)
def test_a_broken_folder_is_named_in_one_line(copy: Path, file: str, content: str | None, message: str) -> None:
    if content is None:
        (copy / file).unlink()
    else:
        (copy / file).write_text(content)
    with pytest.raises(ModelError) as raised:
        TextModel.load(copy)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_template_that_does_not_end_is_refused_at_the_start(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(30) %}{% endfor %}{% endfor %}"
    (copy / "chat_template.jinja").write_text(loops)
    TextModel.load(copy)
    monkeypatch.setattr("alignedserve.text.chat_template.MOST_RENDER_S", 0.01)
    with pytest.raises(ModelError, match=r"takes more than 0\.01 s for a short chat"):
        TextModel.load(copy)


def test_what_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        TextModel.load(tmp_path / "nowhere")


# --- The bytes of single tokens


@given(written=unicode_text)
def test_the_bytes_of_tokens_together_are_those_of_their_text(text: TextModel, written: str) -> None:
    assert b"".join(map(text.token_bytes, ids_of(text, written))).decode() == written


def test_a_special_token_is_its_name_and_a_number_without_a_token_is_nothing(text: TextModel) -> None:
    assert text.token_bytes(2) == b"<|end|>"
    assert text.token_bytes(10**6) == b""


def test_a_token_is_shown_alike_however_many_others_were_shown_before(text: TextModel) -> None:
    for _ in range(3):
        assert text.token_bytes.shown(2) == ("<|end|>", [*b"<|end|>"])
        for token in range(10, 10 + MOST_SHOWN):
            assert text.token_bytes.shown(token)[1] == [*text.token_bytes(token)]


def test_tokens_for_single_bytes_are_those_bytes() -> None:
    vocabulary = {"<unk>": 0, "\u2581Hi": 1, "<0xF0>": 2, "<0x9F>": 3, "a": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert [*map(TokenBytes(tokenizer), (1, 2, 3, 4))] == [b" Hi", b"\xf0", b"\x9f", b"a"]
    tokenizer.decoder = decoders.Metaspace()
    assert TokenBytes(tokenizer)(2) == b"<0xF0>", "where the tokenizer reads it so"


@settings(deadline=None)
@given(
    st.lists(st.text(max_size=300), max_size=3) | st.lists(st.text(max_size=4), max_size=100),
    st.integers(1, 400),
    st.integers(1, 40),
)
def test_no_text_is_wrongly_called_too_long(text: TextModel, texts: list[str], most: int, times: int) -> None:
    texts = [text * times for text in texts]
    exceeds = sum(len(text.answer_ids(asked_text)) for asked_text in texts) > most
    assert exceeds or not text.surely_exceeds(texts, most)


def test_of_a_text_that_is_far_too_long_little_is_tokenised(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    encode = TextModel.answer_ids

    def noted(self: TextModel, answer: str) -> list[int]:
        seen.append(len(answer))
        return encode(self, answer)

    monkeypatch.setattr(TextModel, "answer_ids", noted)
    assert text.surely_exceeds(["7 " * (1 << 20)], 100)
    assert sum(seen) <= 8192
