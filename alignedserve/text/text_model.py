"""Convert text to token ids and back with the tokenizer of a model folder.

Only the tokenizers library is used: transformers takes seconds to import.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from alignedserve.architectures.given import Given, encode_json, read_json, read_json_if_there
from alignedserve.architectures.template_file import TOKENIZER_CONFIG, template_source
from alignedserve.architectures.vectors import PooledRule
from alignedserve.config.choices import AUTO
from alignedserve.core import Sampling
from alignedserve.errors import ModelError, PromptError
from alignedserve.text.calls.formats import (
    GENERAL,
    CallFormat,
    described,
    find_call_format,
    named_call_format,
    with_short_ids,
)
from alignedserve.text.chat_template import USUAL, ChatTemplate, Rendering
from alignedserve.text.decoding import IncrementalDecoder
from alignedserve.text.encoding import encode, surely_exceeds
from alignedserve.text.infill import InfillTokens
from alignedserve.text.reasoning.families import ReasoningFamily, choose_family
from alignedserve.text.syntax_trial import SyntaxTrial

_TOKENIZER, _CONFIG = "tokenizer.json", TOKENIZER_CONFIG
_MARK = "\u263a"
_BRACKETED = re.compile(r"<.*>\Z", re.DOTALL)


@dataclass(frozen=True)
class TextModel:
    """A model's tokenizer and chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    vocab_size: int
    sampling: Sampling  # of a request that sets none: the model's own, otherwise OpenAI's defaults
    trial: SyntaxTrial
    reasoning: ReasoningFamily | None = None  # how the model reasons before its answers
    call_format: CallFormat = GENERAL  # in which the model calls tools
    shows_tools: bool = False  # whether the template shows tools; otherwise a message describes them
    pooled: PooledRule | None = None  # how the model makes vectors, where it does
    infill: InfillTokens | None = None  # by which the model fills in the middle of a text, where it can

    @classmethod
    def load(cls, folder: Path, reasoning_parser: str = AUTO, tool_call_parser: str = AUTO) -> TextModel:
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder: name a Hugging Face model folder")
        config = Given(folder / "config.json")
        generation = read_json_if_there(folder / "generation_config.json")
        naming = read_json_if_there(folder / _CONFIG)
        text, tokenizer = _read_tokenizer(folder / _TOKENIZER, _special_texts(naming))
        added = tokenizer.get_added_tokens_decoder()
        specials = {token.content: number for number, token in added.items() if token.special}
        source, template = template_source(folder), None
        if source is not None:
            try:
                template = ChatTemplate(source, _variables(naming), specials, text)
            except ModelError as error:
                raise ModelError(f"{folder}: {error}") from error
        form = None  # the template may show none that is known
        if tool_call_parser != AUTO:
            form = named_call_format(tool_call_parser, source or "")
        elif template is not None and template.shows_tools:
            form = find_call_format(template.source)
        return cls(
            tokenizer=tokenizer,
            template=template,
            special_ids=frozenset(specials.values()),
            eos_ids=_eos_ids(config, generation),
            vocab_size=config.text.whole("vocab_size"),
            sampling=_sampling_defaults(folder, generation),
            trial=SyntaxTrial(folder),
            reasoning=choose_family(reasoning_parser, source or ""),
            call_format=form or GENERAL,
            shows_tools=form is not None and template is not None and template.shows_tools,
            infill=InfillTokens.of(
                tokenizer.token_to_id,
                _texts_in(naming.get("fim_tokens")),
                partial(encode, tokenizer, add_special_tokens=False),
            ),
        )

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = USUAL) -> list[int]:
        """Return the prompt of a conversation, usually up to where the assistant's answer begins."""
        if self.template is None:
            raise ModelError("the model has no chat template: send its prompt to /v1/completions")
        if self.call_format.has_short_ids:
            messages = with_short_ids(messages)
        if self.shows_tools:
            return self.template.token_ids(messages, rendering)
        tools, rendering = rendering.tools, replace(rendering, tools=())
        try:
            return self.template.token_ids(described(messages, tools, self.call_format), rendering)
        except PromptError:  # some templates know no system message
            if not tools:
                raise
            return self.template.token_ids(described(messages, tools, self.call_format, apart=False), rendering)

    def prompt_ids(self, text: str, with_special: bool = True) -> list[int]:
        """Return the text's tokens as a prompt, with the special tokens that the model expects around every text.

        A special token that is spelled out in the text becomes that token."""
        return encode(self.tokenizer, text, add_special_tokens=with_special)

    def encoding(self, first: str, second: str | None, with_special: bool) -> Encoding:
        """Return the tokens of a text, or of a pair of texts; each says whether it is special, and its text."""
        return self.tokenizer.encode_batch(
            [first if second is None else (first, second)], add_special_tokens=with_special
        )[0]

    def answer_ids(self, text: str) -> list[int]:
        """Return the text's tokens as the model would write it, with no special tokens around it."""
        return encode(self.tokenizer, text, add_special_tokens=False)

    def inner_ids(self, text: str) -> list[int]:
        """Return the text's tokens where it stands within a text: some tokenizers put a space before each text."""
        mark, num_tokens = self._mark
        return encode(self.tokenizer, mark + text, add_special_tokens=False)[num_tokens:]

    @cached_property
    def _mark(self) -> tuple[str, int]:
        """Return a character that shares no token with others, and how many tokens it has at the begin of a text, where
        the tokenizer puts a space there."""
        ids = self.answer_ids(_MARK)
        has_space = bool(ids) and (self.tokenizer.id_to_token(ids[0]) or "").startswith("\u2581")
        return (_MARK, len(ids)) if has_space else ("", 0)

    def surely_exceeds(self, texts: Iterable[str], most: int) -> bool:
        """Return whether the texts surely have more than `most` tokens."""
        return surely_exceeds(self.answer_ids, texts, most)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Decode the tokens, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def decoder(self, skip_special: bool = True, markers: Iterable[str] = ()) -> IncrementalDecoder:
        """Return a decoder of one output; markers become text even if they are special tokens that are skipped."""
        if not skip_special:
            return IncrementalDecoder(self.decode_all)
        shown = frozenset(self.special_markers(markers).values())
        return IncrementalDecoder(self.decode_all if shown else self.decode, self._skipped_beside(shown))

    @cached_property
    def _skipped_beside(self) -> Callable[[frozenset[int]], frozenset[int]]:
        """Return what says which special tokens are skipped where these are shown: the same set for all decoders."""
        return cache(self.special_ids.difference)

    def special_markers(self, markers: Iterable[str]) -> dict[str, int]:
        """Return the special tokens among the markers and in them, with their ids."""
        return {name: number for name, number in self.grammar_tokens(markers).items() if number in self.special_ids}

    def grammar_tokens(self, markers: Iterable[str]) -> dict[str, int]:
        """Return the tokens among the markers and in them that a grammar must name by their ids: spelled out as text,
        no output could follow them."""
        return {name: number for marker in markers for name, number in self._named_in(marker).items()}

    @cached_property
    def _named_in(self) -> Callable[[str], Mapping[str, int]]:
        """Return what finds such tokens in a marker; it keeps them, since markers come with every request."""
        added = self.tokenizer.get_added_tokens_decoder()
        # Qwen's <tool_call> is not special to its tokenizer; llguidance takes whatever stands in <> for special.
        named = {id: token.content for id, token in added.items() if token.special or _BRACKETED.match(token.content)}

        def find(marker: str) -> Mapping[str, int]:
            return {named[number]: number for number in self.answer_ids(marker) if number in named}

        return cache(find)


def _read_tokenizer(path: Path, specials: set[str]) -> tuple[bytes, Tokenizer]:
    """Return the text of tokenizer.json, in which each token that the configuration calls special is marked special,
    and its tokenizer."""
    described = read_json(path)
    added_tokens = described.get("added_tokens") or []
    if not isinstance(added_tokens, list) or not all(isinstance(added, dict) for added in added_tokens):
        raise ModelError(f"{path}: added_tokens must be a list of objects")
    for added in added_tokens:
        added["special"] = added.get("special", False) or added.get("content") in specials
    try:
        text = encode_json(described)
        tokenizer = Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return text, tokenizer


def _token_text(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, where it is a text or an object that holds the text."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _variables(naming: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a template may name, by their names."""
    named = {key: _token_text(token) for key, token in naming.items() if key.endswith("_token")}
    return {key: text for key, text in named.items() if text is not None}


def _special_texts(naming: Mapping[str, Any]) -> set[str]:
    """Return the texts of all tokens that tokenizer_config.json calls special."""
    more = [*_tokens_in(naming.get("additional_special_tokens")), *_tokens_in(naming.get("extra_special_tokens"))]
    listed = naming.get("added_tokens_decoder") or {}
    marked = [token for token in listed.values() if isinstance(token, dict) and token.get("special")]
    return {*_variables(naming).values(), *(text for token in [*more, *marked] if (text := _token_text(token)))}


def _texts_in(named: Any) -> dict[str, str]:
    return {key: text for key, text in named.items() if isinstance(text, str)} if isinstance(named, dict) else {}


def _tokens_in(listed: Any) -> list[Any]:
    if listed is not None and not isinstance(listed, dict | list):
        raise ModelError(f"{_CONFIG}: special tokens must be a list or an object, not {listed!r:.40}")
    return list(listed.values()) if isinstance(listed, dict) else list(listed or ())


def _eos_ids(config: Given, generation: Mapping[str, Any]) -> tuple[int, ...]:
    own = config if config.get("eos_token_id") is not None else config.text
    ids: list[int] = []
    for value in (own.get("eos_token_id"), generation.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int and number >= 0 for number in ids):
        raise ModelError(f"eos_token_id must be the number of a token, or several, not {ids}")
    return tuple(dict.fromkeys(ids))


def _sampling_defaults(folder: Path, generation: Mapping[str, Any]) -> Sampling:
    names: tuple[str, ...] = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    usual = Sampling(temperature=1.0)
    if generation.get("do_sample") is False:
        names, usual = ("repetition_penalty",), Sampling()
    own = {name: value for name in names if (value := generation.get(name)) is not None}
    try:
        return replace(usual, **own)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'generation_config.json'}: {error}") from error


# --- The bytes of tokens

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MOST_SHOWN = 4096  # tokens, of some 300 bytes of memory each


class TokenBytes:
    """The bytes that each token of a tokenizer stands for by itself, which may be only a part of a character.

    Tokenizers write bytes in two ways: in an alphabet of 256 characters, or with ▁ for spaces and tokens for single
    bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = {step["type"] for step in _steps(tokenizer.decoder)}
        self._alphabet = _alphabet() if "ByteLevel" in kinds else None
        self._has_bytes = "ByteFallback" in kinds
        self._added = {number: token.content.encode() for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}
        self._shown: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._read(token)
        return found

    def shown(self, token: int) -> tuple[str, list[int]]:
        """Return the text and the bytes of a token as log-probabilities show them: to be read alone, since most tokens
        are shown again and again, and making both takes half of the time of writing log-probabilities."""
        found = self._shown.get(token)
        if found is None:
            if len(self._shown) == MOST_SHOWN:
                self._shown.clear()
            found = self._shown[token] = self(token).decode("utf-8", "replace"), [*self(token)]
        return found

    def _read(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        written: str = self._tokenizer.id_to_token(token) or ""  # a vocabulary may be padded with ids that have no text
        if self._alphabet is not None:
            alphabet = self._alphabet
            return b"".join(alphabet.get(character, character.encode()) for character in written)
        if self._has_bytes and (byte := _BYTE.fullmatch(written)):
            return bytes([int(byte[1], 16)])
        return written.replace("\u2581", " ").encode()


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a decoder, which may be a sequence of decoders; none where there is no decoder."""
    described: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {}
    yield from described.get("decoders") or ([described] if described else [])


def _alphabet() -> dict[str, bytes]:
    """Return GPT-2's characters for bytes: a printable byte is its own character, the others follow 0xFF in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    characters = {chr(byte): bytes([byte]) for byte in printable}
    return characters | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}
