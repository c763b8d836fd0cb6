"""Text to token ids and back, for one model folder.

With the tokenizers library alone: transformers takes seconds to import.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from alignedserve.architectures.given import Given
from alignedserve.architectures.model_config import read_json
from alignedserve.core import Sampling
from alignedserve.errors import ModelError
from alignedserve.text.calls import CallFormat
from alignedserve.text.chat_template import USUAL, ChatTemplate, Rendering, encoded
from alignedserve.text.syntax import Syntaxes
from alignedserve.text.token_bytes import TokenBytes

_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
LEAST_SLICE, CUT_TOKENS = 4096, 16  # characters; tokens that there may be more of a slice than of its text
_UNKNOWN = "\ufffd"  # stands in decoded text for bytes that are no character, or none yet


@dataclass(frozen=True)
class SamplingDefaults:
    """What holds where a request names none: OpenAI's, unless the model has its own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class TextModel:
    tokenizer: Tokenizer
    template: ChatTemplate | None
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    vocab_size: int
    sampling: SamplingDefaults
    syntaxes: Syntaxes

    @classmethod
    def load(cls, folder: Path) -> TextModel:
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder: name a Hugging Face model folder")
        config = Given(folder / "config.json")
        generation = _read_json_if_there(folder / "generation_config.json")
        naming = _read_json_if_there(folder / _CONFIG)
        text = _tokenizer_text(folder / _TOKENIZER, _special_names(naming))
        tokenizer = _tokenizer(folder / _TOKENIZER, text)
        specials = {token.content: number for number, token in _added(tokenizer).items() if token.special}
        return cls(
            tokenizer=tokenizer,
            template=_template(folder, naming, specials, text),
            special_ids=frozenset(specials.values()),
            eos_ids=_eos_ids(config, generation),
            vocab_size=config.text.whole("vocab_size"),
            sampling=_sampling_defaults(folder, generation),
            syntaxes=Syntaxes(folder),
        )

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], how: Rendering = USUAL) -> list[int]:
        """Of messages with `role` and `content`, as a rule up to where the assistant is to go on."""
        if self.template is None:
            raise ModelError("the model has no chat template: send its prompt to /v1/completions")
        return self.template.ids(messages, how)

    @property
    def call_format(self) -> CallFormat | None:
        """In which the model calls tools that it is shown."""
        return self.template.call_format if self.template is not None else None

    def prompt_ids(self, text: str, with_special: bool = True) -> list[int]:
        """With what the model wants around every text. A special token that the text spells out is one."""
        return encoded(self.tokenizer, text, add_special_tokens=with_special)

    def answer_ids(self, text: str) -> list[int]:
        """Of what the model might say: nothing stands around it."""
        return encoded(self.tokenizer, text, add_special_tokens=False)

    def surely_exceeds(self, texts: Iterable[str], most: int) -> bool:
        """Whether these texts are more than so many tokens, found a slice at a time: tokens of megabytes, all at once,
        would take gigabytes. What a cut may add to a slice is taken off, so that no text is wronged."""
        longest = max(LEAST_SLICE, 4 * most)
        found = 0
        for text in texts:
            for start in range(0, len(text), longest):
                found += max(0, len(self.answer_ids(text[start : start + longest])) - CUT_TOKENS)
                if found > most:
                    return True
        return False

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Special tokens too."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def decoder(self, skip_special: bool = True) -> IncrementalDecoder:
        return (
            IncrementalDecoder(self.decode, self.special_ids) if skip_special else IncrementalDecoder(self.decode_all)
        )


class IncrementalDecoder:
    """Token ids to text, piece by piece; the pieces together are what decoding all ids at once gives.

    A token may end within a character, and how a token reads may depend on the one before it. So a window
    of the last tokens is decoded anew for each new one, and what the window gave before is cut off:

        window   [ context | new ]        context: the tokens of the last piece
        text     [ given   | piece | � ]  held back: bytes that may yet become a character

    Where nothing but broken bytes come, the window moves on all the same once it is `MOST` tokens long,
    so that a token costs a bounded number of decoded tokens. Weak spot: decoders of the byte-fallback kind turn
    each byte of an invalid run into a �, even one that began as a character; that we gave already.
    """

    MOST, KEPT = 32, 16  # tokens of a window that does not end with a character
    HELD = 3  # an unfinished character is at most so many bytes, and each may read as one �

    def __init__(self, decode: Callable[[Sequence[int]], str], special_ids: Iterable[int] = ()) -> None:
        self._decode = decode
        self._special_ids = frozenset(special_ids)
        self._window: list[int] = []
        self._context = 0  # tokens at the window's start whose text has been given
        self._given = 0  # characters at the start of the window's text that have been given

    def feed(self, ids: Iterable[int]) -> str:
        new = [number for number in ids if number not in self._special_ids]
        if not new:
            return ""
        self._window += new
        text = self._decode(self._window)
        whole = text.rstrip(_UNKNOWN)
        if len(whole) == len(text):
            return self._move(text)
        if len(self._window) - self._context <= self.MOST:
            return self._give(text, max(len(whole), self._given))
        return self._force(text, min(len(text) - len(whole), self.HELD))

    def flush(self) -> str:
        """What was held back, once nothing more comes."""
        return self._give(text := self._decode(self._window), len(text))

    def _give(self, text: str, until: int) -> str:
        piece, self._given = text[self._given : until], until
        return piece

    def _move(self, text: str) -> str:
        """Drop the context; what came after it is the next one."""
        piece = self._give(text, len(text))
        self._window = self._window[self._context :]
        self._context, self._given = len(self._window), len(self._decode(self._window))
        return piece

    def _force(self, text: str, held: int) -> str:
        piece = self._give(text, max(len(text) - held, self._given))
        self._window = self._window[-self.KEPT :]
        self._context, self._given = 0, max(0, len(self._decode(self._window)) - held)
        return piece


def _read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _tokenizer_text(path: Path, special_names: set[str]) -> str:
    """tokenizer.json, in which a token that the configuration calls special is marked so."""
    described = read_json(path)
    added_tokens = described.get("added_tokens") or []
    if not isinstance(added_tokens, list) or not all(isinstance(added, dict) for added in added_tokens):
        raise ModelError(f"{path}: added_tokens must be a list of objects")
    for added in added_tokens:
        added["special"] = added.get("special", False) or added.get("content") in special_names
    return json.dumps(described)


def _tokenizer(path: Path, text: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _added(tokenizer: Tokenizer) -> dict[int, Any]:
    return dict(tokenizer.get_added_tokens_decoder())


def _token_text(token: Any) -> str | None:
    """A token of tokenizer_config.json is a text, or an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _variables(naming: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a template may name."""
    named = {key: _token_text(token) for key, token in naming.items() if key.endswith("_token")}
    return {key: text for key, text in named.items() if text is not None}


def _special_names(naming: Mapping[str, Any]) -> set[str]:
    more = [*_tokens_in(naming.get("additional_special_tokens")), *_tokens_in(naming.get("extra_special_tokens"))]
    listed = naming.get("added_tokens_decoder") or {}
    marked = [token for token in listed.values() if isinstance(token, dict) and token.get("special")]
    return {*_variables(naming).values(), *(text for token in [*more, *marked] if (text := _token_text(token)))}


def _tokens_in(given: Any) -> list[Any]:
    if given is not None and not isinstance(given, dict | list):
        raise ModelError(f"{_CONFIG}: special tokens must be a list or an object, not {given!r:.40}")
    return list(given.values()) if isinstance(given, dict) else list(given or ())


def _template(folder: Path, naming: Mapping[str, Any], specials: Iterable[str], tokenizer: str) -> ChatTemplate | None:
    source = _template_source(folder, naming.get("chat_template"))
    if source is None:
        return None
    try:
        return ChatTemplate(source, _variables(naming), specials, tokenizer)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error


def _template_source(folder: Path, configured: Any) -> str | None:
    try:
        return _read_text(folder / _TEMPLATE)
    except FileNotFoundError:
        pass
    if isinstance(configured, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
        configured = named.get("default")
    if configured is not None and not isinstance(configured, str):
        raise ModelError(f"{folder / _CONFIG}: chat_template must be a text")
    return configured


def _eos_ids(config: Given, generation: Mapping[str, Any]) -> tuple[int, ...]:
    own = config if config.get("eos_token_id") is not None else config.text
    ids: list[int] = []
    for given in (own.get("eos_token_id"), generation.get("eos_token_id")):
        ids += given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(number) is int and number >= 0 for number in ids):
        raise ModelError(f"eos_token_id must be the number of a token, or several, not {ids}")
    return tuple(dict.fromkeys(ids))


def _sampling_defaults(folder: Path, generation: Mapping[str, Any]) -> SamplingDefaults:
    if generation.get("do_sample") is False:
        names: tuple[str, ...] = ("repetition_penalty",)
        usual = SamplingDefaults(temperature=0.0)
    else:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        usual = SamplingDefaults()
    own = {name: value for name in names if (value := generation.get(name)) is not None}
    try:
        Sampling(**own)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'generation_config.json'}: {error}") from error
    return replace(usual, **own)
