"""Syntaxes: grammars of an output's text, over the tokens of a model.

A syntax is a text in which llguidance writes grammars. Whoever is asked for JSON makes one of the schema and tries it;
a worker asks it for the tokens that may come next. Nothing is precomputed: what a mask needs is found as it is
asked for, so that a syntax is there at once, however large it is, and a mask costs some tens of microseconds.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from alignedserve.architectures.model_config import read_json
from alignedserve.errors import ModelError

if TYPE_CHECKING:  # engines run where it is not, as long as nobody asks for a syntax
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions  # there is none while it runs

_END = "\ue000the end of a text\ue001"  # a token beside the model's: which of its own end an output, a request says
# What a pattern may cost. A mask takes microseconds, but of (a{1000}){1000} it takes as long as there is of this, and
# all steps of a worker wait for it: 0.3 s, where the library's default is more than a second. Of an enum of as many
# characters as a syntax may have, it takes less than a third.
_LEXER_FUEL = 300_000
JSON_SPACES = r"( |\n {0,32})?"  # between two parts of JSON: without a bound, a weak model writes nothing else


def json_syntax(schema: Any, spaces: str | None = None) -> str:
    """Of JSON that a schema describes; `spaces` is the pattern of what may stand between its parts, "" is nothing."""
    from llguidance import LLMatcher

    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}  # whatever a schema says of itself
    if spaces == "":
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = JSON_SPACES if spaces is None else spaces
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def regex_syntax(pattern: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


def lark_syntax(rules: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(rules)


class Syntaxes:
    """Of one model. Safe to be used by several threads."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / "tokenizer.json", Lock()

    def why_not(self, syntax: str) -> str | None:
        """What keeps a syntax from being followed, if anything does."""
        matcher = self.matcher(syntax)
        allowed = matcher.compute_bitmask()
        first = next((8 * at + byte.bit_length() - 1 for at, byte in enumerate(allowed) if byte), None)
        if first is not None:
            matcher.consume_token(first)  # that a pattern is too large to be followed shows only now
        why, *_ = matcher.get_error().split("<state>")  # what follows is for who works on the library
        return " ".join(why.split()) or None

    def matcher(self, syntax: str) -> LLMatcher:
        """At its start. One that cannot be made is in a state of error."""
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            tokens = self._tokens
        return LLMatcher(tokens, syntax, log_level=0, limits=LLParserLimits(initial_lexer_fuel=_LEXER_FUEL))

    def load(self) -> None:
        """What else the first one to ask would wait for: half a second, for a large vocabulary."""
        with self._lock:
            _ = self._tokens

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        described = read_json(self._path)
        try:
            added, vocabulary = described.get("added_tokens") or [], described["model"]["vocab"]
            numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
            number = 1 + max([*numbers, *(token["id"] for token in added)])
            end = {"id": number, "content": _END, "special": True}
            plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            described["added_tokens"] = [*added, {**end, **plain}]
            return LLTokenizer(json.dumps(described), eos_token=number)
        except (ValueError, TypeError, KeyError) as error:
            message = f"{self._path} has tokens that no grammar can be made for: {' '.join(str(error).split())}"
            raise ModelError(message) from error
