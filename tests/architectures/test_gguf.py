"""Tests that a GGUF file leads to a model folder with the tokenizer of the model it was made of, or to one line that
says why not."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import TokenType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.gguf.folder import folder_of
from alignedserve.architectures.gguf.places import Kind, Rows, kept_bytes, read_places
from alignedserve.architectures.gguf.tokenizer import SPLITS
from alignedserve.architectures.model_source import DEMO_FOLDER, resolve
from alignedserve.errors import ModelError, UnsupportedModel
from alignedserve.text.text_model import TextModel
from tests.conftest import examples
from tests.gguf_files import write_tokenizer
from tests.rare import thinned

TEXTS = [
    "Hello, world! It's 12345 o'clock -- I'LL go; they've gone.",
    "  two spaces,\n\n\n a tab\tand \r\n the end   ",
    "naïve café — 東京へ行きます。 Ελληνικά, עברית, العربية, हिन्दी 👩‍👩‍👧 🇳🇱",
    "def f(x):\n    return x ** 2  # squares\n",
    "e\u0301 (two characters) and \u00e9 (one), \ufb01 \u2126",
    "CamelCaseWords and snake_case_words/paths/to\nfiles 3.14159e-10",
    "<|user|>text between special tokens<|end|>",
    "",
]
# Each name stands for a pattern that the original tokenizer.json has.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


More = Callable[[gguf.GGUFWriter], None]
CONFIG = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 56,
    "attention.head_count": 4,
    "rope.dimension_count": 8,
}


def write(path: Path, more: More = write_tokenizer, architecture: str = "llama", **changes: Any) -> Path:
    """Write a file with a table of words and no layers."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**CONFIG, **changes}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((97, 32), np.float32))
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- Tokenizers


def tokenizer_of(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(resolve(str(path)) / "tokenizer.json"))


def assert_equal(ours: Tokenizer, original: Tokenizer) -> None:
    for text in TEXTS:
        for special in (False, True):
            expected = original.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special).ids == expected, text
        assert ours.decode(expected, skip_special_tokens=False) == original.decode(expected, skip_special_tokens=False)


def original_with(pre_tokenizer: Any, normal_form: Any = None) -> Tokenizer:
    """Return the demo model's tokenizer with another way to split texts."""
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normal_form is not None:
        tokenizer.normalizer = normal_form
    return tokenizer


def by(pattern: str) -> pre_tokenizers.PreTokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])


DIGITS = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
ORIGINALS = {
    "gpt-2": lambda: original_with(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": lambda: original_with(pre_tokenizers.Sequence(DIGITS)),
    "qwen2": lambda: original_with(by(QWEN2), normalizers.NFC()),
    "smaug-bpe": lambda: original_with(by(LLAMA3)),
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_a_byte_level_tokenizer_is_the_original(pre: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", lambda writer: write_tokenizer(writer, pre=pre))
    assert_equal(tokenizer_of(path), ORIGINALS[pre]())


def test_the_demo_model_s_whole_tokenizer_is_taken(tmp_path: Path) -> None:
    """Its way to split texts has no name; a file may carry the whole tokenizer.json."""
    text = (DEMO_FOLDER / "tokenizer.json").read_text()

    def more(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer)
        writer.add_string("tokenizer.huggingface.json", text)

    path = write(tmp_path / "a.gguf", more)
    assert_equal(tokenizer_of(path), Tokenizer.from_str(text))


@pytest.mark.parametrize("pre", thinned({split: name for name, split in SPLITS.items()}.values(), usual=4))
@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_no_text_is_lost(pre: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    if not path.exists():
        write(path, lambda writer: write_tokenizer(writer, pre=pre))
    tokenizer = tokenizer_of(path)
    read = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
    normal = normalizers.NFC().normalize_str(text) if SPLITS[pre].normal_form else text
    assert read == normal


def sentence_piece() -> Tokenizer:
    """Return a tokenizer such as Llama 2 has, whose merges make words of the house's own text."""
    specials = ["<unk>", "<s>", "</s>"]
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*specials, *alphabet], show_progress=False)
    tokenizer.train_from_iterator([(Path(__file__).read_text()), *TEXTS[:2]], trainer)
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = described["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(described))


@pytest.mark.parametrize("adds_space", [True, False])
def test_a_sentence_piece_tokenizer_is_the_original(adds_space: bool, tmp_path: Path) -> None:
    original = sentence_piece()
    if not adds_space:
        original.normalizer = normalizers.Replace(" ", "\u2581")
        original.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    described = json.loads(original.to_str())
    ids = described["model"]["vocab"]
    ranks = {"".join(merge): rank for rank, merge in reversed([*enumerate(described["model"]["merges"])])}

    def more(writer: gguf.GGUFWriter) -> None:
        tokens = sorted(ids, key=lambda token: ids[token])
        writer.add_tokenizer_model("llama")
        writer.add_token_list(
            [token.replace("\u2581\u2581", "  ") if not token.strip("\u2581") else token for token in tokens]
        )
        writer.add_token_scores([-float(ranks.get(token, 0)) for token in tokens])
        kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
        writer.add_token_types([*kinds, *[TokenType.NORMAL] * (len(tokens) - len(kinds))])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_add_space_prefix(adds_space)

    assert_equal(tokenizer_of(write(tmp_path / "a.gguf", more)), original)


def test_chat_template_and_special_tokens_are_the_original_s(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer)
        writer.add_string("tokenizer.huggingface.json", (DEMO_FOLDER / "tokenizer.json").read_text())

    ours, original = (
        TextModel.load(folder) for folder in (resolve(str(write(tmp_path / "a.gguf", more))), DEMO_FOLDER)
    )
    messages = [{"role": "user", "content": "Hello <|end|> there"}]
    assert ours.chat_ids(messages) == original.chat_ids(messages)
    assert ours.eos_ids == original.eos_ids
    assert ours.special_ids == original.special_ids


@pytest.mark.parametrize("names", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_the_tokens_of_a_middle_are_those_that_the_file_names(names: tuple[str, ...], tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer)
        for number, name in enumerate((*names, "fim_pad", "fim_rep", "fim_sep")):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", 300 + number)

    infill = TextModel.load(resolve(str(write(tmp_path / "a.gguf", more)))).infill
    assert infill is not None
    assert (infill.prefix, infill.suffix, infill.middle, infill.repo, infill.file) == (300, 301, 302, 304, 305)
    assert infill.ends == (300, 301, 302, 304, 305, 303)


# --- Files


def test_sampling_that_a_file_does_not_name_may_be_given(tmp_path: Path) -> None:
    file, given = write(tmp_path / "model.gguf"), {"temperature": 0.2, "top_p": 0.9}
    own, plain = (TextModel.load(folder_of(file, tmp_path / "cache", each)).sampling for each in (given, {}))
    assert (own.temperature, own.top_p) == (0.2, 0.9)
    assert (plain.temperature, plain.top_p) == (1.0, 1.0)


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    folder = resolve(str(path))
    written = (folder / "config.json").stat().st_mtime_ns
    assert resolve(str(path)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    write(path, block_count=3)
    assert read_config(resolve(str(path))).num_layers == 3


def test_numbers_that_are_not_quantised_are_kept_whole(tmp_path: Path) -> None:
    folder = resolve(str(write(tmp_path / "a.gguf")))
    assert [kept_bytes(folder, whole) for whole in (2, 4)] == [97 * 32 * 2, 97 * 32 * 4]


def test_kinds_have_the_numbers_of_the_format() -> None:
    for kind in Kind:
        of_format = gguf.GGMLQuantizationType[kind.name]
        assert kind.value[:3] == (of_format.value, *gguf.GGML_QUANT_SIZES[of_format])


@pytest.mark.parametrize(
    ("architecture", "tensor", "shape", "more", "rows"),
    [
        ("gemma", "output_norm.weight", (32,), 1.0, None),
        ("gemma", "output.weight", (97, 32), 0.0, None),
        ("llama", "blk.0.attn_q.weight", (32, 32), 0.0, Rows((4, 4, 2), (1, 2))),
    ],
)
def test_where_a_file_differs_from_transformers(
    architecture: str, tensor: str, shape: tuple[int, ...], more: float, rows: Rows | None, tmp_path: Path
) -> None:
    def with_tensor(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer)
        writer.add_float32(f"{architecture}.attention.layer_norm_epsilon", 1e-5)
        writer.add_tensor(tensor, np.zeros(shape, np.float32))

    *_, place = read_places(resolve(str(write(tmp_path / "a.gguf", with_tensor, architecture)))).values()
    assert (place.shape, place.more, place.rows) == (shape, more, rows)


def test_a_folder_may_hold_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = write(folder / "a.gguf")
    assert resolve(str(folder)) == resolve(str(path))
    for name in ("b.gguf", "c.gguf"):
        shutil.copy(path, folder / name)
    with pytest.raises(ModelError, match=r"several models, a\.gguf and b\.gguf"):
        resolve(str(folder))
    (folder / "model.safetensors").touch()
    assert resolve(str(folder)) == folder


def test_parts_of_a_file_are_one_model(tmp_path: Path) -> None:
    first = write(tmp_path / "a-00001-of-00002.gguf")
    with pytest.raises(ModelError, match=r"lacks a-00002-of-00002\.gguf"):
        resolve(str(first))
    writer = gguf.GGUFWriter(tmp_path / "a-00002-of-00002.gguf", "llama")
    writer.add_tensor("output.weight", np.zeros((97, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert resolve(str(tmp_path)) == resolve(str(first)) == resolve(str(tmp_path / "a-00002-of-00002.gguf"))
    config = read_config(resolve(str(first)))
    assert (config.tied_embeddings, config.dtype) == (False, "bfloat16"), "matrices of two types"


def test_what_ends_an_answer(tmp_path: Path) -> None:
    """llama.cpp ends at the tokens that are known for it, whatever one the file names."""

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list(["a", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "[PAD4]"])
        control = TokenType.CONTROL
        writer.add_token_types([TokenType.NORMAL, control, control, control, TokenType.UNUSED])
        writer.add_token_merges([])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    folder = resolve(str(write(tmp_path / "a.gguf", more)))
    assert TextModel.load(folder).eos_ids == (2, 3)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("a").ids == [1, 0]
    assert tokenizer.id_to_token(4) is None


# --- Refused


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("architecture mamba is not read from GGUF", {"architecture": "mamba"}),
        ("a mixture of experts is not supported", {"expert_count": 8}),
        ("rope.dimension_count 4 with heads of 8 is not supported", {"rope.dimension_count": 4}),
    ],
)
def test_what_is_not_supported_is_named(why: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", **changes)
    with pytest.raises(UnsupportedModel, match=why):
        resolve(str(path))


def _type(writer: gguf.GGUFWriter) -> None:
    write_tokenizer(writer)
    writer.add_tensor("output.weight", np.zeros((97, 84), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q2_K)


def _tensor(writer: gguf.GGUFWriter) -> None:
    write_tokenizer(writer)
    writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((8, 32), np.float32))


def _split(writer: gguf.GGUFWriter) -> None:
    write_tokenizer(writer, pre="superbpe")


def _unigram(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("t5")
    writer.add_token_list(["a"])


@pytest.mark.parametrize(
    ("why", "more"),
    [
        ("tensor output.weight is stored as Q2_K: only F32, ", _type),
        ("tensor blk.0.ffn_gate_inp.weight, which no other file of the architecture llama has", _tensor),
        ("splits texts by the rule superbpe", _split),
        ("a tokenizer of kind t5 is not supported", _unigram),
    ],
)
def test_what_a_file_holds_that_is_not_supported_is_named(why: str, more: More, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", more)
    with pytest.raises(UnsupportedModel, match=why):
        resolve(str(path))


def _aligned(writer: gguf.GGUFWriter, alignment: float) -> None:
    write_tokenizer(writer)
    writer.add_float32("general.alignment", alignment)


def _merges(writer: gguf.GGUFWriter) -> None:
    write_tokenizer(writer)
    writer.kv_data[0].pop("tokenizer.ggml.merges", None)
    writer.add_array("tokenizer.ggml.merges", [1, 2])


def _brackets(writer: gguf.GGUFWriter) -> None:
    write_tokenizer(writer)
    writer.add_string("tokenizer.huggingface.json", "[" * 100_000)


def _arrays(writer: gguf.GGUFWriter) -> None:
    write_tokenizer(writer)
    writer.add_array("general.tags", [[[[1]]]])


@pytest.mark.parametrize(
    ("why", "more", "changes"),
    [
        ("its merges .* are no texts", _merges, {}),
        ("huggingface.json cannot be read", _brackets, {}),
        ("arrays in arrays of arrays", _arrays, {}),
        ("head_count 0", write_tokenizer, {"attention.head_count": 0}),
        *(("its alignment is", partial(_aligned, alignment=alignment), {}) for alignment in (math.nan, -32.0, 2.5)),
    ],
)
def test_hostile_files_give_one_line(why: str, more: More, changes: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", more, **changes)
    with pytest.raises(ModelError, match=why) as raised:
        resolve(str(path))
    assert "\n" not in str(raised.value)


def test_a_file_without_a_vocabulary_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", lambda _: None)
    with pytest.raises(ModelError, match="has no vocabulary"):
        resolve(str(path))


def test_a_file_that_is_not_whole_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"a\.gguf ends in the middle of its header: fetch it again"):
        resolve(str(path))


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_broken_files_give_one_line(data: st.DataObject, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    if not whole.exists():
        write(whole)
    content = bytearray(whole.read_bytes())
    cut = data.draw(st.integers(0, len(content)))
    at = data.draw(st.integers(0, 2_000))
    number = data.draw(st.sampled_from([0, 1, 255, 2**31, 2**40, 2**63]))
    struct.pack_into("<Q", content, at, number)
    path = tmp_path / "broken.gguf"
    path.write_bytes(content[:cut] if data.draw(st.booleans()) else content)
    problem = problem_of(path)
    assert problem is None or "\n" not in problem


def problem_of(path: Path) -> str | None:
    try:
        resolve(str(path))
    except ModelError as error:
        return str(error)
    return None
