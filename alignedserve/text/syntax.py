"""Grammars that an output's text must follow ("syntaxes"), over the tokens of a model.

A syntax is a grammar in llguidance's own text form. The gateway makes one from a client's JSON schema, pattern or
grammar and has it tried (syntax_trial.py); a worker asks it which tokens may come next. No mask is computed ahead: it
is found when it is asked for, in some tens of microseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from random import Random
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, finalize

from alignedserve.architectures.given import encode_json, read_json
from alignedserve.errors import ModelError

if TYPE_CHECKING:  # an engine runs without llguidance installed, as long as no request has a syntax
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions  # exists for type checkers only

# A token added to the model's own that means the end of the text. Which of the model's tokens end an output differs
# by request, so none of them can stand for it.
_END = "\ue000the end of a text\ue001"
# The work that a syntax's first mask may cost, and that each later one may. A mask usually takes microseconds, but that
# of (a{1000}){1000} takes as long as this allows, and all steps of a worker wait for it: 0.1 to 0.2 s here, 0.7 by the
# library's default. Of as many characters as a syntax may have, an enum of words of 4 to 8 letters needs most: 45,000.
_FIRST_FUEL, _MASK_FUEL = 300_000, 75_000
# The mean of the masks behind the first that a trial allows: with 2,048 and 49,152 tokens those of common schemas and
# patterns take 0.01 to 0.8 ms, of (a{150}){150} 2.4 and 2.9, of (a{300}){300} 13.
_MOST_MASK_S, _WALKED = 0.002, 16
_TOO_SLOW = f"to find what may come next takes more than {_MOST_MASK_S * 1000:g} ms for each token: make it smaller"
# What the library says in a word of its own, for clients.
_FAULTS = {"NoExtensionBias": "no text follows it; does a $ref or a rule lead to nothing but itself?"}
JSON_SPACES = r"( |\n {0,32})?"  # between two parts of JSON: without a bound, a weak model writes only white space


def json_syntax(schema: Any, spaces: str | None = None) -> str:
    """Return the syntax of the JSON that a schema describes.

    `spaces` is the pattern of the white space between the parts of the JSON; "" allows none."""
    from llguidance import LLMatcher

    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}  # these override what the schema asks
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


def is_gbnf(rules: str) -> bool:
    """Return whether rules are in llama.cpp's language: its first rule shows it."""
    return re.match(r"(?:\s|#[^\n]*\n)*[\w-]+\s*::=", rules) is not None


def gbnf_syntax(rules: str) -> str:
    """Return the syntax of rules in llama.cpp's language; raise ValueError where they cannot be said in ours.

    A hostile chain of rules takes minutes: this is for a process whose time is limited."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return lark_syntax(gbnf_to_lark(rules))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(str(error) or type(error).__name__) from None


def _take_any(matcher: LLMatcher, draw: Random) -> bool:
    """Let the matcher take a token that may come, and return whether there is one."""
    allowed = matcher.compute_bitmask()
    later = allowed[draw.randrange(len(allowed)) :].lstrip(b"\0") or allowed.lstrip(b"\0")
    return bool(later) and matcher.consume_token(8 * (len(allowed) - len(later)) + later[0].bit_length() - 1)


def _fault_of(matcher: LLMatcher) -> str | None:
    """Return why the matcher cannot go on, or None if it can, or has ended."""
    fault, *_ = matcher.get_error().split("<state>")  # the rest is for the library's developers
    said = " ".join(fault.split())
    return _FAULTS.get(said, said) if said else None


class Template:
    """A compiled syntax, at its start. Those who follow it have copies, which share most of its memory."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.first_bits, self.may_be_empty = matcher.compute_bitmask(), matcher.is_accepting()

    def matcher(self) -> LLMatcher:
        return self._matcher.deep_copy()


class Syntaxes:
    """Makes matchers of syntaxes for one model's tokens; several threads may use it.

    A syntax may take tens of megabytes, so it is kept for those alone who wait for it or follow it."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / "tokenizer.json", Lock()
        self._templates: WeakValueDictionary[str, Template] = WeakValueDictionary()

    def find_fault(self, syntax: str) -> str | None:
        """Return why an output cannot follow the syntax, or None if it can."""
        matcher, draw = self._make(syntax), Random(0)
        if not _take_any(matcher, draw):  # only now does it show whether a pattern is too large to be followed
            return _fault_of(matcher)
        began, took_s, most_s = thread_time(), 0.0, _WALKED * _MOST_MASK_S
        for _ in range(_WALKED):
            if took_s > most_s or not _take_any(matcher, draw):
                break
            took_s = thread_time() - began
        return _TOO_SLOW if took_s > most_s else _fault_of(matcher)

    def prepare(self, syntax: str, holder: object) -> None:
        """Compile the syntax, and keep what is compiled for as long as the holder exists."""
        finalize(holder, _let_go, self.template(syntax)).atexit = False

    def template(self, syntax: str) -> Template:
        """Return the compiled syntax. It is compiled once for all who have it at a time, and kept for nobody else."""
        with self._lock:
            template = self._templates.get(syntax)
        if template is None:
            made = Template(self._make(syntax))
            with self._lock:
                template = self._templates.setdefault(syntax, made)
        return template

    def matcher(self, syntax: str) -> LLMatcher:
        """Return a matcher at the start of the syntax; if the syntax is invalid, the matcher is in its error state."""
        return self.template(syntax).matcher()

    def _make(self, syntax: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(initial_lexer_fuel=_FIRST_FUEL, step_lexer_fuel=_MASK_FUEL)
        return LLMatcher(self.load(), syntax, log_level=0, limits=limits)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token's text; none for an id that the tokenizer does not have."""
        tokens = self.load()
        return tokens.decode_bytes([token]) if token < tokens.vocab_size else b""

    def load(self) -> LLTokenizer:
        """Return the tokenizer, which is read once: a large one takes half a second, so the first request should not
        wait for it."""
        with self._lock:
            return self._tokens

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
            return LLTokenizer(encode_json(described).decode(), eos_token=number)
        except (ValueError, TypeError, KeyError) as error:
            message = f"grammars cannot be made for the tokens in {self._path}: {' '.join(str(error).split())}"
            raise ModelError(message) from error


def _let_go(template: Template) -> None:
    """Do nothing: until this is called, it is called with the template, which exists so long."""


_OF_ONE = ("items", "contains", "additionalProperties")  # keywords with one schema
_OF_SEVERAL = ("prefixItems", "anyOf", "oneOf", "allOf")
_OF_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SPEAKS_OF_OTHERS = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref"}


def closed(schema: Any) -> Any:
    """Return the JSON schema with its objects closed: they have no other properties than it names.

    JSON Schema leaves objects open, so a weak model may write properties of its own until its length ends the answer.
    An object stays as it is where it names no properties, speaks of others itself (`additionalProperties` and such), or
    is a part of an `allOf` with several members, where each names only some of the properties."""
    return _closed(schema, frozenset(_shared_references(schema)))


def _closed(schema: Any, shared: frozenset[str], at: str = "#") -> Any:
    if not isinstance(schema, Mapping):
        return schema
    new: dict[str, Any] = {key: held.copy() if isinstance(held, list | dict) else held for key, held in schema.items()}
    for keyword, place, inner in _parts(schema):
        if keyword == "allOf" and len(schema[keyword]) > 1:
            continue
        if place is None:
            new[keyword] = _closed(inner, shared, f"{at}/{keyword}")
        else:
            new[keyword][place] = _closed(inner, shared, f"{at}/{keyword}/{place}")
    if schema.get("properties") and at not in shared and not _SPEAKS_OF_OTHERS & schema.keys():
        new["additionalProperties"] = False
    return new


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """Yield the schemas in a schema: keyword, place in what it holds, schema."""
    for keyword, held in schema.items():
        if keyword in _OF_ONE:
            yield keyword, None, held
        elif keyword in _OF_SEVERAL and isinstance(held, list):
            for place, inner in enumerate(held):
                yield keyword, place, inner
        elif keyword in _OF_NAMED and isinstance(held, Mapping):
            for name, inner in held.items():
                yield keyword, name, inner


def _shared_references(schema: Any) -> Iterator[str]:
    """Yield the references that stand beside properties, or in an allOf beside other members.

    One that is no text is left for llguidance to refuse."""
    if not isinstance(schema, Mapping):
        return
    members = schema.get("allOf", ())
    several = isinstance(members, list) and (len(members) > 1 or schema.get("properties"))
    for beside in [*([schema] if schema.get("properties") else ()), *(members if several else ())]:
        if isinstance(beside, Mapping) and isinstance(reference := beside.get("$ref"), str):
            yield reference
    for _, _, inner in _parts(schema):
        yield from _shared_references(inner)
