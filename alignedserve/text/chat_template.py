"""Chat messages to token ids, such that no message can write a special token.

A template that writes `<|user|>` means one token; a user who writes it means eight characters. Once
rendered, the two look alike. So they are told apart before, and by characters alone:

    content          <|end|> ok              a special token's first and last characters are exchanged
    masked           S|end|T ok              for stand-ins, which are characters that no content has
    rendered         <|user|>S|end|T ok<|end|>
    template's own   ^^^^^^^^          ^^^^^^^  whatever still reads as a special token
    named            {user}<|end|> ok{end}   those get their secret names, and the stand-ins are undone

Then a copy of the tokenizer in which special tokens go only by their secret names encodes the whole in
one pass, so that all a tokenizer does at the borders of a special token is as the model learnt it.

A template may look for text in a content (`'</think>' in content`). Its own string literals are
therefore left as they are, unless one could be a part of a special token.

Weak spot: a template that changes characters of a content (`upper`, `urlencode`), or that writes both ends of
a special token around one, as some do with a role. Roles come from a fixed list.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from alignedserve.errors import ModelError, PromptError
from alignedserve.text.calls import format_of

_PRIVATE_USE = range(0x10FFFD, 0xF0000, -1)


def encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """As a batch of one: unlike `encode`, which holds up every other thread for seconds when a text has megabytes."""
    ids: list[int] = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


@dataclass(frozen=True)
class Rendering:
    """What a template is given beside the messages."""

    tools: tuple[dict[str, Any], ...] = ()
    opens_answer: bool = True  # the prompt goes up to where the assistant is to begin
    goes_on: bool = False  # the last message is the assistant's, and not at its end
    more: Mapping[str, Any] = field(default_factory=dict)  # what the template knows beside


USUAL = Rendering()


class ChatTemplate:
    def __init__(self, source: str, variables: Mapping[str, str], specials: Iterable[str], tokenizer: str) -> None:
        """`tokenizer` is the text of a tokenizer.json, `specials` are its special tokens."""
        environment = _environment()
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template cannot be read: {_one_line(error)}") from error
        self._variables = dict(variables)
        self._known = meta.find_undeclared_variables(parsed)
        self._knows_developers = "developer" in source
        self.call_format = format_of(source) if "tools" in source else None
        self._names = {special: _secret_name() for special in specials}
        self._tokenizer = _renamed(tokenizer, self._names)
        self._literals = {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}

    def ids(self, messages: Sequence[Mapping[str, Any]], how: Rendering = USUAL) -> list[int]:
        if unknown := how.more.keys() - self._known:
            raise PromptError(f"the model's chat template knows no {min(unknown)}")
        stand_ins = self._stand_ins(texts_in([messages, how.tools, how.more]))
        shown = [self._message(message, stand_ins) for message in messages]
        rendered = self._render(
            messages=shown,
            tools=self._masked(how.tools, stand_ins) or None,
            add_generation_prompt=how.opens_answer,
            more=self._masked(how.more, stand_ins),
        )
        if how.goes_on:
            rendered = _up_to(rendered, shown[-1]["content"])
        named = self._special.sub(lambda found: self._names[found[0]], rendered)
        back = str.maketrans({stand_in: character for character, stand_in in stand_ins.items()})
        return encoded(self._tokenizer, named.translate(back), add_special_tokens=False)

    def _stand_ins(self, contents: Iterable[str]) -> dict[str, str]:
        taken = set[str]().union(*contents)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in taken)
        return dict(zip(self._edges, islice(free, len(self._edges)), strict=True))

    def _message(self, message: Mapping[str, Any], stand_ins: Mapping[str, str]) -> dict[str, Any]:
        """Roles come from a fixed list, and a template compares them."""
        role = message["role"]
        masked: dict[str, Any] = self._masked({**message, "role": ""}, stand_ins)
        return {**masked, "role": "system" if role == "developer" and not self._knows_developers else role}

    def _masked(self, given: Any, stand_ins: Mapping[str, str]) -> Any:
        """All texts of it; names too, but for those that are what a template may ask for."""
        if isinstance(given, str):
            return self._maskable.sub(lambda found: stand_ins.get(found[0], found[0]), given)
        if isinstance(given, Mapping):
            return {
                name if self._is_plain(name) else self._masked(name, stand_ins): self._masked(value, stand_ins)
                for name, value in given.items()
            }
        if isinstance(given, list | tuple):
            return [self._masked(one, stand_ins) for one in given]
        return given

    def _is_plain(self, name: str) -> bool:
        return name.isidentifier() and not self._special.search(name)

    def _render(self, more: Mapping[str, Any], **given: Any) -> str:
        try:
            return self._template.render({**self._variables, "documents": None, **more, **given})
        except Exception as error:  # a template is a program, and stumbles as any over what it was not made for
            raise PromptError(f"the model's chat template refuses these messages: {_one_line(error)}") from error

    @cached_property
    def _edges(self) -> list[str]:
        """The characters that a special token begins or ends with."""
        stripped = [special.strip() for special in self._names if special.strip()]
        return sorted({edge for special in stripped for edge in (special[0], special[-1])})

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return _any_of(self._names)

    @cached_property
    def _maskable(self) -> re.Pattern[str]:
        """An edge, or a literal of the template, which is left as it is."""
        kept = [
            literal
            for literal in self._literals
            if set(literal) & set(self._edges) and not any(_touch(literal, special) for special in self._names)
        ]
        return _any_of([*kept, *self._edges])


def texts_in(given: Any) -> Iterator[str]:
    """All that are in it."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        for name, value in given.items():
            yield name
            yield from texts_in(value)
    elif isinstance(given, list | tuple):
        for one in given:
            yield from texts_in(one)


def _up_to(rendered: str, content: str) -> str:
    """What is rendered up to the end of the last message's content, without white space at its end."""
    before, found, _ = rendered.rpartition(content.strip())
    if not found:
        raise PromptError("the model's chat template does not show the last message as it is: it cannot go on")
    return before + found


def _touch(literal: str, special: str) -> bool:
    """Whether the special token could begin or end within the literal."""
    tails = [literal[at:] for at in range(len(literal))]
    heads = [literal[: at + 1] for at in range(len(literal))]
    begins = any(tail.startswith(special) or special.startswith(tail) for tail in tails)
    return begins or any(head.endswith(special) or special.endswith(head) for head in heads)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _secret_name() -> str:
    """What no user can type: it never leaves this process."""
    return f"\ue000{secrets.token_hex(16)}\ue001"


def _renamed(tokenizer: str, names: Mapping[str, str]) -> Tokenizer:
    """The tokenizer with its special tokens under other names, and the ids that they had."""
    described = json.loads(tokenizer)
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
    return Tokenizer.from_str(json.dumps(described))


class _Generation(Extension):
    """`{% generation %}` marks what the model is trained on; to render, it means nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers has it, whose templates these are."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
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
