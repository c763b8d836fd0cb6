"""tokenizer.json and its configuration from a GGUF file's metadata.

A file has the vocabulary, and either the merges of a byte-level tokenizer and the name of its way to split texts, or
the scores of SentencePiece, from which the merges follow. It may also have the whole tokenizer.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.architectures.gguf.file import GgufFile
from alignedserve.errors import ModelError, UnsupportedModel

_SPACE = "\u2581"
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # types of tokens
_PADDING = re.compile(r"\[PAD\d+\]")  # fills the vocabulary up to the model's
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Tokens by which the model fills in the middle (text/infill.py), by their names today and before.
_INFILL = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "repo": ("fim_rep",),
    "file": ("fim_sep",),
    "end": ("fim_pad",),
}
# Special tokens that end an answer, as llama.cpp knows them; a file names one or two of its own.
_ENDS = set("<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT>".split())
_ENDS |= {"</s>", "<|end_of_text|>"}
_KEEPING_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # after them; Phi 3 drops spaces after its other special tokens
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}

Described = dict[str, Any]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file."""

    file: GgufFile
    texts: Sequence[str]
    kinds: Sequence[int]

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}")

    @property
    def architecture(self) -> str:
        return str(self.file.metadata.get("general.architecture"))

    def token(self, name: str) -> str | None:
        """Return the text of a token that has this name: bos, eos, ..."""
        number = self.get(f"{name}_token_id")
        return self.texts[number] if isinstance(number, int) and 0 <= number < len(self.texts) else None

    @property
    def ids(self) -> dict[str, int]:
        """Return the id of each token; the first, where several have one text."""
        ids: dict[str, int] = {}
        for number, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)):
            if kind != _UNUSED or not _PADDING.fullmatch(text):
                ids.setdefault(text, number)
        return ids

    def of_kind(self, *kinds: int) -> Iterator[tuple[int, str]]:
        return ((number, self.texts[number]) for number, kind in enumerate(self.kinds) if kind in kinds)


def read_vocabulary(file: GgufFile) -> Vocabulary:
    texts = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ModelError(f"{file.path} has no vocabulary (tokenizer.ggml.tokens)")
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [1] * len(texts)
    if len(kinds) != len(texts):
        raise ModelError(f"{file.path} has {len(texts)} tokens and {len(kinds)} types of them")
    return Vocabulary(file, texts, kinds)


def end_tokens(vocabulary: Vocabulary) -> list[int]:
    """Return the ids of the tokens that end an answer, the one that the file calls so first."""
    named = [vocabulary.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    known = [number for number, text in vocabulary.of_kind(_CONTROL) if text in _ENDS]
    return list(dict.fromkeys(number for number in [*named, *known] if isinstance(number, int)))


def tokenizer_config(vocabulary: Vocabulary) -> Described:
    """Return tokenizer_config.json: the names of special tokens, and the chat template."""
    named = {key: vocabulary.token(name) for key, name in _NAMES.items()}
    config: Described = {key: text for key, text in named.items() if text is not None}
    infill = {key: next(filter(None, map(vocabulary.token, names)), None) for key, names in _INFILL.items()}
    config["fim_tokens"] = {key: text for key, text in infill.items() if text is not None}
    template = vocabulary.file.metadata.get("tokenizer.chat_template")
    return config | ({"chat_template": template} if isinstance(template, str) else {})


def generation_config(vocabulary: Vocabulary) -> Described:
    """Return generation_config.json: the sampling that the file recommends."""
    found = {key: vocabulary.file.metadata.get(f"general.sampling.{name}") for key, name in _SAMPLING.items()}
    return {key: value for key, value in found.items() if value is not None}


def tokenizer_json(vocabulary: Vocabulary) -> Described:
    whole = vocabulary.file.metadata.get("tokenizer.huggingface.json")
    if isinstance(whole, str):
        try:
            return dict(json.loads(whole))
        except (ValueError, TypeError, RecursionError) as error:
            raise ModelError(f"{vocabulary.file.path}: tokenizer.huggingface.json cannot be read: {error}") from error
    match vocabulary.get("model"):
        case "gpt2":
            return _byte_level(vocabulary)
        case "llama":
            return _sentence_piece(vocabulary)
    kind = vocabulary.get("model")
    raise UnsupportedModel(f"{vocabulary.file.path}: a tokenizer of kind {kind} is not supported: gpt2 and llama are")


# --- Byte-level


def _byte_level(vocabulary: Vocabulary) -> Described:
    name = vocabulary.get("pre") or "default"
    if name not in SPLITS:
        known = ", ".join(SPLITS)
        why = f"splits texts by the rule {name} (tokenizer.ggml.pre), which is not known: {known} are"
        raise UnsupportedModel(f"{vocabulary.file.path}: its tokenizer {why}")
    split = SPLITS[name]
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    listed = vocabulary.get("merges") or []
    if not isinstance(listed, list) or not all(isinstance(merge, str) for merge in listed):
        raise ModelError(f"{vocabulary.file.path}: its merges (tokenizer.ggml.merges) are no texts")
    merges = [merge.split(" ", 1) for merge in listed]
    return {
        **_usual(vocabulary, split.begins),
        "normalizer": {"type": split.normal_form} if split.normal_form else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "decoder": level,
        "model": _bpe(vocabulary.ids, merges, ignore_merges=split.ignores_merges),
    }


# --- SentencePiece


def _sentence_piece(vocabulary: Vocabulary) -> Described:
    adds_space = vocabulary.get("add_space_prefix") is not False
    # Tokens of several spaces have them plain in files, where SentencePiece writes its own.
    ids = {text if text.strip(" ") else _SPACE * len(text): number for text, number in vocabulary.ids.items()}
    replace: Described = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back: Described = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    unknown = next((text for _, text in vocabulary.of_kind(_UNKNOWN)), vocabulary.token("unknown"))
    return {
        **_usual(vocabulary, begins=True),
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(ids, _merges(vocabulary, ids), unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[list[str]]:
    """Return every pair of tokens that make another, those of a better score first."""
    scores = vocabulary.get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.texts):
        raise ModelError(f"{vocabulary.file.path} has no scores of its tokens (tokenizer.ggml.scores)")
    by_id = vocabulary.architecture.startswith("gemma")  # whose scores say less
    halves = [
        (number if by_id else -scores[number], at, len(text) - at, text)
        for text, number in ids.items()
        for at in range(1, len(text))
        if text[:at] in ids and text[at:] in ids
    ]
    best = sorted(halves, key=lambda half: (half[0], -half[1], -half[2]))
    return [[text[:at], text[at:]] for _, at, _, text in best]


# --- Both


def _usual(vocabulary: Vocabulary, begins: bool) -> Described:
    special = [(number, text, True) for number, text in vocabulary.of_kind(_UNKNOWN, _CONTROL)]
    plain = [(number, text, False) for number, text in vocabulary.of_kind(_USER_DEFINED) if text.strip(" ")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(vocabulary, *token) for token in sorted([*special, *plain])],
        "post_processor": _around(vocabulary, begins),
    }


def _added(vocabulary: Vocabulary, number: int, text: str, special: bool) -> Described:
    flags = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
    strips = special and vocabulary.architecture == "phi3" and text not in _KEEPING_SPACES
    return {"id": number, "content": text, **flags, "rstrip": strips, "special": special}


def _around(vocabulary: Vocabulary, begins: bool) -> Described | None:
    """Return what puts special tokens around each text."""
    said, ends = vocabulary.get("add_bos_token"), vocabulary.get("add_eos_token") is True
    first = vocabulary.token("bos") if (begins if said is None else said) else None
    last = vocabulary.token("eos") if ends else None
    if first is None and last is None:
        return None

    def around(*sequences: str) -> list[Described]:
        texts = [{"Sequence": {"id": name, "type_id": 0}} for name in sequences]
        return [*_special(first), *texts, *_special(last)]

    ids = vocabulary.ids
    tokens = {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in (first, last) if text is not None}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B"), "special_tokens": tokens}


def _special(text: str | None) -> list[Described]:
    return [] if text is None else [{"SpecialToken": {"id": text, "type_id": 0}}]


def _bpe(ids: Mapping[str, int], merges: Sequence[Sequence[str]], **more: Any) -> Described:
    usual = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **more}
    unused = dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    return {"type": "BPE", **unused, **usual, "vocab": dict(ids), "merges": list(merges)}


# --- Patterns: how byte-level tokenizers split a text before they merge, by the names that files use for them
# (`tokenizer.ggml.pre`). Several are applied one after the other, each to what the one before it left.

_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_WITH_SLASH}"
_GPT4O = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTED}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTED}?"
    rf"|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UNNAMED = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")  # what llama.cpp does


@dataclass(frozen=True)
class Split:
    patterns: tuple[str, ...]
    ignores_merges: bool = False  # a piece that is a token stays one, whatever the merges say
    normal_form: str | None = None
    begins: bool = False  # whether a text begins with the token for that, where the file does not say


_OF_LLAMA3 = Split((_LLAMA3,), ignores_merges=True, begins=True)
_OF_DIGITS = Split((r"\p{N}", _GPT2))
_OF_QWEN2 = Split((_QWEN2,), normal_form="NFC")
_OF_GPT4O = Split((_GPT4O,))

SPLITS = {
    "default": Split(_UNNAMED),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split((_LLAMA3,))),
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "exaone4"), Split((_GPT2,))),
    **dict.fromkeys(("mpt", "olmo"), Split((_GPT2,), normal_form="NFC")),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _OF_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _OF_QWEN2),
    "stablelm2": Split((_QWEN2,)),
    "qwen35": Split((_QWEN35,), normal_form="NFC"),
    "tekken": Split((_TEKKEN,), ignores_merges=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _OF_GPT4O),
    "deepseek-v3": Split((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
}
