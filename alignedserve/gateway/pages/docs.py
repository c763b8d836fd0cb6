"""The page /docs: the OpenAPI document in HTML. It loads nothing, so it works where no other server can be reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from alignedserve.gateway.pages.html import html_page

_ABOUT = (
    '<p>OpenAI\'s API, with what AlignedServe adds. Programs read <a href="openapi.json">/openapi.json</a>. '
    "A server with keys takes one as <code>Authorization: Bearer KEY</code>.</p>"
)


def docs_page(document: Mapping[str, Any]) -> str:
    operations = [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    routes = "".join(_operation(name, operation) for name, operation in operations)
    bodies = "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_fields(schema)}</details>'
        for name, schema in document["components"]["schemas"].items()
    )
    errors = operations[0][1]["responses"].items()  # those of all routes
    rows = [f"<tr><td>{status}</td><td>{escape(error['description'])}</td></tr>" for status, error in errors]
    refusals = f'<div class="scroll"><table>{"".join(rows[1:])}</table></div>'
    return html_page(
        "API", f"{_ABOUT}<h2>Routes</h2>{routes}<h2>Bodies</h2>{bodies}<h2>Errors of any route</h2>{refusals}"
    )


def _operation(name: str, operation: Mapping[str, Any]) -> str:
    parts = [_table("parameter", ((given["name"], given, given["in"]) for given in operation.get("parameters", ())))]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>Body, {_code(kind)}:</p>{_fields(content['schema'])}")
    contents = operation["responses"]["200"]["content"]
    schemas = [content["schema"] for content in contents.values()]
    shown = next((schema for schema in schemas if "properties" in schema), schemas[0])
    parts.append(f"<p>Answer, {' or '.join(map(_code, contents))}:</p>{_fields(shown)}")
    about = escape(operation["summary"])
    return f"<details><summary>{_code(name)} {about}</summary>{''.join(parts)}</details>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _fields(schema: Mapping[str, Any]) -> str:
    """Return a table of an object's fields, or the type of anything else."""
    if "properties" not in schema:
        return f"<p>{_type(schema)}</p>"
    required = schema.get("required", ())
    fields = schema["properties"].items()
    rows = ((name, {"schema": field}, "required" if name in required else "") for name, field in fields)
    return _table("field", rows)


def _table(what: str, rows: Iterable[tuple[str, Mapping[str, Any], str]]) -> str:
    shown = [
        f"<tr><td><code>{escape(name)}</code></td><td>{_type(given['schema'])}</td><td>{escape(note)}</td></tr>"
        for name, given, note in rows
    ]
    head = f"<tr><th>{what}</th><th>type</th><th></th></tr>"
    return f'<div class="scroll"><table>{head}{"".join(shown)}</table></div>' if shown else ""


_BOUNDS: Mapping[str, str] = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
}


def _type(schema: Mapping[str, Any]) -> str:
    """Return a schema in a few words of HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[union])))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in values)
    if schema.get("type") == "array":
        words = f"list of {_type(schema.get('items', {}))}"
    else:
        words = str(schema.get("type", "anything"))
    bounds = ", ".join(text.format(schema[name]) for name, text in _BOUNDS.items() if name in schema)
    return f"{words} <span class=soft>{escape(bounds)}</span>" if bounds else words
