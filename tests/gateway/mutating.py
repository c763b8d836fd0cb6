"""HTTP requests of every route and method, drawn from a grammar of the API, with one mutation each.

The grammar is the OpenAPI document: a body is drawn from its schema, with values that rules ask for and no schema
tells (tests/filled.py). Then one thing of the request is changed: a value, the bytes, a header, the method, the path,
the query, or when the client leaves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from urllib.parse import quote

from alignedserve.gateway.openapi import document
from tests.filled import USUAL, WITH

_REF = "#/components/schemas/"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "FOO", "")
_DEEP = 6  # levels of a drawn body
_TEXTS = (
    *(
        "Hi",
        "",
        " ",
        "\n",
        "a" * 300,
        "naïve 東京 😀",
        "\0",
        "\ud83d",
        "<|im_start|>system",
        "</think>",
        "{{ x }}",
        "null",
    ),
    *("[1, 2]", "1e999", "-1", "0", "../../etc/passwd", "%s%n", "data:image/png;base64,AAAA", "\u202e", "(a{3}){3}"),
)
_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), [], {}, [[]], [None], {"a": {}}, {"": ""}, {"$ref": "#"}, [0] * 3000, ["a"] * 3000),
)
_NAMES = ("", "model", "__class__", "type", "$ref", "a" * 5000, "\ud83d", "slo", "input", "content", "id", "7")
_EITHER: tuple[tuple[dict[str, Any], ...], ...] = (  # a body that knows all of these fields has one of the groups
    ({"text_1": "Hi", "text_2": ["a", "b"]}, {"queries": "Hi", "items": ["a"]}),
    ({"prompt": "Hi"}, {"messages": USUAL["messages"]}),
    ({"lora_path": "/adapters/a"},),
)
_IDS = ("x", "", "%00", "..", "%2e%2e%2f", "a%2fb", "%ff", "\u00e9", "a" * 9000, "resp_", "file-", "batch_", "gpt-4o?")
_QUERIES = (
    "limit=0",
    "limit=-1",
    "limit=a",
    "limit=1e3",
    "limit=9" + "9" * 5000,
    "after=%00",
    "after",
    "order=up",
    "&&=",
    "%",
)
_QUERIES += (
    "limit=1&limit=2",
    "format=perfetto",
    "format=text",
    "format=pdf",
    "stream=true",
    "purpose=%ff",
    "a" * 9000,
)
_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    *((b"content-type", value) for value in (b"", b"text/plain", b"application/json; charset=\xff", b"a/b/c;;=")),
    *(
        (b"content-type", b"multipart/form-data" + rest)
        for rest in (b"", b"; boundary=", b"; boundary=a", b"; boundary=\xff")
    ),
    *((b"content-encoding", value) for value in (b"gzip", b"identity", b"\xff")),
    *((b"content-length", value) for value in (b"0", b"-1", b"a", b"99999999999999999999", b"1, 2", b"\xff")),
    *((b"authorization", value) for value in (b"Bearer", b"Bearer \xff\xfe", b"Basic !", b"Basic /w==", b"x" * 9000)),
    *(
        (name, b"\xff\0")
        for name in (b"x-request-id", b"x-api-key", b"origin", b"host", b"accept", b"range", b"cookie")
    ),
    *((b"range", value) for value in (b"bytes=0-0", b"bytes=5-1", b"bytes=-1", b"bytes=a-", b"bytes=0-0,2-3")),
    *((b"traceparent", value) for value in (b"00-0-0-0", b"\xff", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01")),
    *(
        (b"if-none-match", b'"a"'),
        (b"expect", b"100-continue"),
        (b"last-event-id", b"7"),
        (b"idempotency-key", b"\xff"),
    ),
    *((b"access-control-request-method", b"POST"), (b"x-slo-ttft-ms", b"nan"), (b"anthropic-version", b"\xff")),
)


@dataclass(frozen=True)
class Call:
    """A request, as a server hands it to the application."""

    method: str
    path: str  # as it was sent
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    query: bytes = b""
    cuts: tuple[int, ...] = ()  # where the body is cut into messages
    leaves: bool = False  # the client goes before the body has ended
    mutation: str = "none"


class Grammar:
    """Draws requests. `ids` are names of what was made: files, responses, batches."""

    def __init__(self, pages: Sequence[tuple[str, str]] = ()) -> None:
        """`pages` are routes without a body that the document does not have: method and path."""
        described = document(with_jobs=True)
        self._schemas: Mapping[str, Any] = described["components"]["schemas"]
        self._routes: list[tuple[str, str, Mapping[str, Any]]] = [
            (method.upper(), path, (operation.get("requestBody") or {}).get("content", {}))
            for path, methods in described["paths"].items()
            for method, operation in methods.items()
        ]
        with_body = [route for route in self._routes if route[2]]
        self._drawn = [*self._routes, *((method, path, {}) for method, path in pages), *with_body * 6]
        self.ids: list[str] = []

    def draw(self, draw: Random) -> Call:
        method, path, content = draw.choice(self._drawn)
        path = self._with_ids(draw, path)
        if "multipart/form-data" in content:
            body, kind = _form(draw), b"multipart/form-data; boundary=cut"
            return _changed_around(draw, Call(method, path, body, ((b"content-type", kind),)))
        if not content:
            return _changed_around(draw, Call(method, path))
        value = self._value(draw, content["application/json"]["schema"], "", 0)
        call = Call(method, path, headers=((b"content-type", b"application/json"),))
        if draw.random() < 0.6:
            value, mutation = self._changed(draw, value)
            return replace(call, body=_written(value), mutation=mutation)
        return _changed_around(draw, replace(call, body=_written(value)))

    def _with_ids(self, draw: Random, path: str) -> str:
        known = self.ids[-50:]
        for name in ("{id}", "{name}", "{name:path}"):
            if name in path:
                path = path.replace(name, draw.choice(known) if known and draw.random() < 0.7 else draw.choice(_IDS))
        return path

    # --- A body by its schema

    def _value(self, draw: Random, schema: Mapping[str, Any], field: str, depth: int) -> Any:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].removeprefix(_REF)]
        match schema:
            case {"const": value}:
                return value
            case {"enum": values}:
                return draw.choice(values)
            case _ if field in USUAL and draw.random() < (0.98 if field == "model" else 0.7):
                return USUAL[field]
            case {"anyOf": options} | {"oneOf": options}:
                return self._value(draw, draw.choice(options), field, depth)
            case {"type": "object"}:
                return self._object(draw, schema, depth)
            case {"type": "array", **more}:
                least, most = more.get("minItems", 0), more.get("maxItems", 3)
                number = max(least, min(most, draw.choice((0, 1, 1, 2, 3)) if depth < _DEEP else 0))
                return [self._value(draw, more.get("items", {}), "", depth + 1) for _ in range(number)]
            case {"type": "integer" | "number" as kind, **more}:
                return _number(draw, kind == "integer", more)
            case {"type": "boolean"}:
                return draw.random() < 0.5
            case {"type": "null"}:
                return None
            case {"type": "string", **more}:
                if field.endswith("_id") and self.ids and draw.random() < 0.7:
                    return draw.choice(self.ids[-50:])
                return draw.choice(("a", "Hi", "ab-1")) if "pattern" in more else self._text(draw, more)
        return draw.choice(("a", 1, None, {"type": "string"}, []))

    def _text(self, draw: Random, more: Mapping[str, Any]) -> str:
        text = draw.choice(("Hi", "Hi", "a", "The sea is calm.", draw.choice(_TEXTS)))
        return (text or "a" * more.get("minLength", 0))[: more.get("maxLength", 1 << 20)]

    def _object(self, draw: Random, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, needed = schema.get("properties", {}), schema.get("required", ())
        share = draw.choice((0.03, 0.1, 0.3)) if depth < _DEEP else 0.0
        chosen = [name for name in properties if name in needed or draw.random() < share]
        made = {name: self._value(draw, properties[name], name, depth + 1) for name in chosen}
        for name in chosen:
            made |= {beside: value for beside, value in WITH.get(name, {}).items() if beside in properties}
        for groups in _EITHER:
            fields = {name for group in groups for name in group}
            if fields <= properties.keys():
                made = {name: value for name, value in made.items() if name not in fields} | draw.choice(groups)
        if {"role", "content"} <= properties.keys():
            made.setdefault("content", "Hi")
        others = schema.get("additionalProperties")
        if others and not properties:
            values = {"type": "string"} if others is True else others
            made |= {draw.choice(("7", "a", "type", "300")): self._value(draw, values, "", depth + 1) for _ in range(2)}
        return made

    # --- One mutation of a body's values

    def _changed(self, draw: Random, value: Any) -> tuple[Any, str]:
        """Return the body with one of its values changed, and how."""
        value = deepcopy(value)  # parts of it are everybody's
        places = list(_places(value))
        owner, key = draw.choice(places) if places else (None, None)
        if owner is None:
            return draw.choice(_JUNK), "another body"
        was = owner[key]
        how, change = draw.choice(_CHANGES)
        new = change(draw, deepcopy(was))
        if how == "left out":
            del owner[key]
        elif how == "another name":
            target = owner if isinstance(owner, dict) else was if isinstance(was, dict) else value
            if isinstance(target, dict):
                target[draw.choice((*_NAMES, *USUAL))] = new
        else:
            owner[key] = new
        return value, f"{key}: {how}"


def _number(draw: Random, is_whole: bool, more: Mapping[str, Any]) -> float:
    low = more.get("minimum", more.get("exclusiveMinimum", 0) + (1 if is_whole else 0.01))
    high = more.get("maximum", more.get("exclusiveMaximum", 1 << 31) - (1 if is_whole else 0.01))
    if draw.random() < 0.1:
        return draw.choice((low, high))
    value = min(high, max(low, draw.randint(0, 20)))
    return int(value) if is_whole else value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _other_number(draw: Random, was: Any) -> Any:
    if not isinstance(was, int | float):
        return draw.choice(_JUNK)
    return draw.choice((was + 1, was - 1, -was, str(was), [was], float(was) if abs(was) < 1e300 else 0, was * 10**6))


def _other_text(draw: Random, was: Any) -> Any:
    if not isinstance(was, str):
        return draw.choice(_TEXTS)
    return draw.choice((was + draw.choice(_TEXTS), draw.choice(_TEXTS) + was, was * 50, was[:-1], was.upper(), [was]))


def _deep(draw: Random, was: Any) -> Any:
    deep: Any = was
    for _ in range(draw.choice((1, 2, 60, 500))):
        inner: Any = deep
        deep = [inner] if draw.random() < 0.5 else {"a": inner}
    return deep


def _copy(draw: Random, was: Any) -> Any:
    if isinstance(was, list):
        return was * draw.choice((2, 200))
    return [was, was] if draw.random() < 0.5 else {"type": was}


_CHANGES: tuple[tuple[str, Callable[[Random, Any], Any]], ...] = (
    ("junk", lambda draw, _: draw.choice(_JUNK)),
    ("left out", lambda _, was: was),
    ("another name", lambda draw, was: draw.choice((was, *_JUNK))),
    ("another number", _other_number),
    ("another text", _other_text),
    ("deep", _deep),
    ("more of it", _copy),
)


# --- One mutation around a body


def _changed_around(draw: Random, call: Call) -> Call:
    """Return the request with its bytes, a header, its method, its path, its query or its sending changed."""
    how = draw.choice(("bytes", "bytes", "header", "header", "method", "path", "query", "cuts", "leaves"))
    if how == "bytes" and call.body:
        return replace(call, body=_other_bytes(draw, call.body), mutation=how)
    if how == "header":
        name, value = draw.choice(_HEADERS)
        kept = [header for header in call.headers if header[0] != name or draw.random() < 0.5]
        return replace(call, headers=(*kept, (name, value)), mutation=f"header {name.decode()}")
    if how == "method":
        return replace(call, method=draw.choice(_METHODS), mutation=how)
    if how == "path":
        cut = draw.randint(0, len(call.path))
        other = draw.choice(
            (call.path + "/", "/" + call.path, call.path[:cut], call.path[:cut] + "%00" + call.path[cut:])
        )
        return replace(call, path=draw.choice((other, call.path.upper(), call.path + ";a", "*", "")), mutation=how)
    if how == "query":
        return replace(call, query=draw.choice(_QUERIES).encode(), mutation=how)
    if how == "cuts":
        cuts = sorted(draw.randint(0, len(call.body)) for _ in range(draw.choice((1, 3, 20))))
        return replace(call, cuts=tuple(cuts), mutation=how)
    return replace(call, cuts=(len(call.body) // 2,), leaves=True, mutation="leaves")


def _other_bytes(draw: Random, body: bytes) -> bytes:
    at, extra = (
        draw.randrange(len(body)),
        draw.choice((b"\0", b"\xff", b'"', b"}", b"{", b",", b"\xef\xbb\xbf", b"\\u", b"1e9999")),
    )
    match draw.randrange(6):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + bytes([body[at] ^ 1 << draw.randrange(8)]) + body[at + 1 :]
        case 2:
            return body[:at] + extra + body[at:]
        case 3:
            return body[:at] + body[at : at + 20] * 2 + body[at + 20 :]
        case 4:
            return extra + body
    return body.replace(b"{", b"[", 1) if draw.random() < 0.5 else body[: at + 1] + b"[" * 20_000


def _form(draw: Random) -> bytes:
    """Return a form with a file of lines, which are drawn too."""
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "Hi"}}
    part = b'--cut\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    content = b"\n".join([json.dumps(line).encode()] * draw.choice((0, 1, 1, 1, 3)))
    fields = [
        part % (b"purpose", b"", draw.choice((b"batch",) * 9 + (b"vision",))),
        part % (b"file", b'; filename="x"', content),
    ]
    if draw.random() < 0.3:
        fields.append(part % (b"expires_after[seconds]", b"", draw.choice((b"3600", b"-1", b"a", b"9" * 5000))))
    return b"".join(fields[:: draw.choice((1, 1, -1))]) + draw.choice((b"--cut--\r\n",) * 8 + (b"", b"--cut"))


def _written(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:  # a deep value in a deep body
        return b"[" * 5000


def raw_path(call: Call) -> bytes:
    return quote(call.path, safe="/%?*;:@").encode()
