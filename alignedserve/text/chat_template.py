"""Turn chat messages into token ids in such a way that no message can write a special token.

If a template writes `<|user|>`, it means one token; if a user writes it, it means eight characters. In the rendered
text the two look the same. So the characters of messages are changed before the template is rendered:

    content          <|end|> ok              the first and last characters of special tokens are replaced
    masked           S|end|T ok              by stand-ins: characters that no message contains
    rendered         <|user|>S|end|T ok<|end|>
    template's own   ^^^^^^^^          ^^^^^^^  whatever still reads as a special token
    named            {user}<|end|> ok{end}   these get their secret names, and the stand-ins are changed back

A copy of the tokenizer knows special tokens by their secret names only. It encodes the whole text in one pass, so
that everything a tokenizer does next to a special token happens as in the model's training.

A template may search a message for a text (`'</think>' in content`). So the template's own string literals are not
masked in messages, unless a literal could be a part of a special token.

Weak spot: a template that changes the characters of a message (`upper`, `urlencode`), or that writes the two ends of
a special token around a text, as some do around the role. Roles come from a fixed list.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from itertools import islice
from threading import Thread
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from alignedserve.architectures.given import decode_json, encode_json
from alignedserve.errors import ModelError, PromptError, PromptTooLong
from alignedserve.text.encoding import encode, surely_exceeds

_PRIVATE_USE = range(0x10FFFD, 0xF0000, -1)


@dataclass(frozen=True)
class Rendering:
    """The inputs of a template besides the messages, and the most tokens that the prompt may have."""

    tools: tuple[dict[str, Any], ...] = ()
    opens_answer: bool = True  # whether the prompt ends where the assistant's answer begins
    continues: bool = False  # whether the answer continues the last message, which is the assistant's
    more: Mapping[str, Any] = field(default_factory=dict)  # variables that a template gets where it has them
    most_tokens: int | None = None  # where it surely has more, PromptTooLong is raised in place of encoding it


USUAL = Rendering()
MOST_RENDER_S = 20.0  # of the first chat: others take a millisecond


class ChatTemplate:
    def __init__(
        self, source: str, variables: Mapping[str, str], specials: Iterable[str], tokenizer: str | bytes
    ) -> None:
        """`tokenizer` is the text of a tokenizer.json, and `specials` are its special tokens."""
        environment = _environment()
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template cannot be read: {_one_line(error)}") from error
        self._variables = dict(variables)
        self._known = meta.find_undeclared_variables(parsed)
        self._attributes = {node.attr for node in parsed.find_all(nodes.Getattr)}
        self._knows_developers = "developer" in source
        self.source = source
        self.shows_tools = "tools" in self._known
        # Names that no user can guess: they never leave this process.
        self._names = {special: f"\ue000{secrets.token_hex(16)}\ue001" for special in specials}
        self._described = tokenizer
        self._literals = {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}
        self._check_that_it_ends()

    def _check_that_it_ends(self) -> None:
        """Raise where a short chat is not rendered in time: a template is a program of the model's, and one that does
        not end would keep a thread of those that read chats."""

        def render() -> None:
            with suppress(Exception):  # what it refuses is said where it is asked for
                self._template.render(
                    {**self._variables, "messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True}
                )

        rendering = Thread(target=render, name="template", daemon=True)
        rendering.start()
        rendering.join(MOST_RENDER_S)
        if rendering.is_alive():
            raise ModelError(f"the chat template takes more than {MOST_RENDER_S:g} s for a short chat")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of rendered chats, which is made at the first use: a large one takes half a second."""
        return _renamed(self._described, self._names)

    def has_variable(self, name: str) -> bool:
        return name in self._known

    def reads(self, name: str) -> bool:
        """Return whether the template may read this field of a message."""
        return name in self._attributes or name in self._literals

    def token_ids(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = USUAL) -> list[int]:
        """Return the prompt that the template makes of the messages.

        Some templates take the arguments of earlier calls as an object, others as its text."""
        try:
            return self._token_ids(messages, rendering)
        except PromptError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            return self._token_ids([_with_texts(message) for message in messages], rendering)

    def _token_ids(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> list[int]:
        more = {name: value for name, value in rendering.more.items() if name in self._known}
        # A character that stands in none of the texts for each edge of a special token.
        used = set[str]().union(*all_texts([messages, rendering.tools, more]))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        stand_ins = dict(zip(self._edges, islice(free, len(self._edges)), strict=True))
        shown = [self._mask_message(message, stand_ins) for message in messages]
        variables = {
            **self._variables,
            "documents": None,
            **self._mask(more, stand_ins),
            "messages": shown,
            "tools": self._mask(rendering.tools, stand_ins) or None,
            "add_generation_prompt": rendering.opens_answer,
        }
        try:
            rendered = self._template.render(variables)
        except Exception as error:  # a template is a program: unexpected messages may make it raise anything
            raise PromptError(f"the model's chat template refuses these messages: {_one_line(error)}") from error
        if rendering.continues:  # up to the end of the last message's content, without white space at its end
            continued = shown[-1]["content"].strip()
            if not continued:
                raise PromptError("the last message is empty: the answer cannot continue it")
            before, last, _ = rendered.rpartition(continued)
            if not last:
                raise PromptError("the model's chat template changes the last message: the answer cannot continue it")
            rendered = before + last
        named = self._special.sub(lambda found: self._names[found[0]], rendered)
        back = str.maketrans({stand_in: character for character, stand_in in stand_ins.items()})
        prompt, ids_of = named.translate(back), partial(encode, self.tokenizer, add_special_tokens=False)
        most = rendering.most_tokens
        if most is not None and len(prompt) > most and surely_exceeds(ids_of, [prompt], most):
            raise PromptTooLong
        return ids_of(prompt)

    def _mask_message(self, message: Mapping[str, Any], stand_ins: Mapping[str, str]) -> dict[str, Any]:
        """Mask all of a message but its role: roles come from a fixed list, and templates compare them."""
        role = message["role"]
        masked: dict[str, Any] = self._mask({**message, "role": ""}, stand_ins)
        return {**masked, "role": "system" if role == "developer" and not self._knows_developers else role}

    def _mask(self, value: Any, stand_ins: Mapping[str, str]) -> Any:
        """Mask all texts in a value; names in an object too, except plain names, which a template may look up."""
        if isinstance(value, str):
            return self._maskable.sub(lambda found: stand_ins.get(found[0], found[0]), value)
        if isinstance(value, Mapping):
            return {self._name(name, stand_ins): self._mask(member, stand_ins) for name, member in value.items()}
        if isinstance(value, list | tuple):
            return [self._mask(item, stand_ins) for item in value]
        return value

    def _name(self, name: str, stand_ins: Mapping[str, str]) -> Any:
        is_plain = name.isidentifier() and not self._special.search(name)
        return name if is_plain else self._mask(name, stand_ins)

    @cached_property
    def _edges(self) -> list[str]:
        """Return the characters with which special tokens begin or end."""
        stripped = [special.strip() for special in self._names if special.strip()]
        return sorted({edge for special in stripped for edge in (special[0], special[-1])})

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return _any_of(self._names)

    @cached_property
    def _maskable(self) -> re.Pattern[str]:
        """Match an edge, or a literal of the template; the literal is matched only in order to leave it unchanged."""
        unmasked = [
            literal
            for literal in self._literals
            if set(literal) & set(self._edges) and not any(_overlap(literal, special) for special in self._names)
        ]
        return _any_of([*unmasked, *self._edges])


def _with_texts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with the arguments of its calls as texts."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


def all_texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, names of members too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield name
            yield from all_texts(member)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from all_texts(item)


def _overlap(literal: str, special: str) -> bool:
    """Return whether the special token could begin or end inside the literal."""
    tails = [literal[at:] for at in range(len(literal))]
    heads = [literal[: at + 1] for at in range(len(literal))]
    begins = any(tail.startswith(special) or special.startswith(tail) for tail in tails)
    return begins or any(head.endswith(special) or special.endswith(head) for head in heads)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _renamed(tokenizer: str | bytes, names: Mapping[str, str]) -> Tokenizer:
    """Return the tokenizer with its special tokens under other names but with the same ids."""
    described = decode_json(tokenizer.encode() if isinstance(tokenizer, str) else tokenizer)
    for added in described.get("added_tokens") or ():
        added["content"] = names.get(added["content"], added["content"])
    model = described["model"]
    if isinstance(vocabulary := model.get("vocab"), dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: (token, score) in the order of their ids
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if (unknown := model.get("unk_token")) is not None:
        model["unk_token"] = names.get(unknown, unknown)
    described["post_processor"] = described["truncation"] = described["padding"] = None
    return Tokenizer.from_buffer(encode_json(described))


class _GenerationTag(Extension):
    """The tag `{% generation %}`: it marks the text that models are trained on, and changes nothing when rendering."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return an environment like that of transformers, for which these templates are written."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    known: dict[str, Any] = {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    environment.globals.update(known)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
