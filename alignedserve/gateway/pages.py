"""Small pages in HTML that load nothing else: / chats with what runs here, /docs shows and tries the API.

The answer of / needs no key, so a server with keys names no model there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from json import dumps
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response

from alignedserve.dashboard.page import policy


def html_page(title: str, body: str) -> str:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_text("gateway", "pages.css")}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>'


def html_answer(page: str) -> Response:
    headers = {
        "Content-Security-Policy": policy(page),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(page, headers=headers)


_NAME = "AlignedServe"
_LINKS = {
    "/docs": "every route, with its parameters, body and answers, to be tried",
    "/openapi.json": "the same for programs",
    "/v1/models": "which models answer",
    "/dashboard": "the live page: promises, load, requests, keys, processes, jobs",
    "/metrics": "for Prometheus",
    "/health": "whether requests are served; /live says whether this process answers",
}


def front_answer(http: HttpRequest, version: str, models: Sequence[str], has_keys: bool) -> Response:
    """Answer with a page where a browser asks for one, and with JSON otherwise."""
    if "text/html" in http.headers.get("accept", ""):
        answer = html_answer(_page(version, models, has_keys))
    else:
        served = {} if has_keys else {"version": version, "models": list(models)}
        links = {path.rpartition("/")[2].removesuffix(".json"): path for path in _LINKS}
        answer = JSONResponse({"name": _NAME, **served, "links": links})
    answer.headers["Vary"] = "Accept"
    return answer


def _page(version: str, models: Sequence[str], has_keys: bool) -> str:
    names = ", ".join(f"<code>{escape(model)}</code>" for model in models)
    served = "This server asks for an API key." if has_keys else f"Version {escape(version)} serves {names}."
    rows = "".join(
        f'<tr><td><a href="{path[1:]}">{path}</a></td><td>{escape(meaning)}</td></tr>'
        for path, meaning in _LINKS.items()
    )
    table = f'<section><h2>Where next</h2><div class="scroll"><table>{rows}</table></div></section>'
    return html_page(_NAME, f"<p>{served}</p>{_text('dashboard', 'front.html')}{table}")


@cache
def _text(folder: str, name: str) -> str:
    return files(f"alignedserve.{folder}").joinpath(name).read_text(encoding="utf-8")


_ABOUT = (
    '<p>OpenAI\'s API, with what AlignedServe adds. Programs read <a href="openapi.json">/openapi.json</a>. '
    "A server with keys takes one as <code>Authorization: Bearer KEY</code>.</p>"
    '<p><label>API key, where one is needed: <input id="key" type="password" autocomplete="off"></label></p>'
    '<p><input id="find" type="search" placeholder="Search routes and fields" aria-label="Search"></p>'
)
_GROUPS = {  # heading -> how the paths of its routes begin
    "Chats and texts": ("/v1/chat", "/v1/completions", "/v1/responses", "/v1/messages"),
    "Batch jobs": ("/v1/files", "/v1/batches"),
    "Vectors and ranks": ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"),
    "Tokens, models, adapters": ("/tokenize", "/detokenize", "/v1/models", "/v1/load", "/v1/unload"),
    "Operating": ("/",),
}
_SAID = {"messages": [{"role": "user", "content": "Name three planets."}]}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _SAID,
    "/v1/completions": {"prompt": "The three largest planets are", "max_tokens": 16},
    "/v1/responses": {"input": "Name three planets."},
    "/v1/messages": {**_SAID, "max_tokens": 64},
    "/v1/messages/count_tokens": _SAID,
    "/v1/embeddings": {"input": ["a text", "another"]},
    "/tokenize": {"prompt": "Name three planets."},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/batches": {"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
}


def docs_page(document: Mapping[str, Any]) -> str:
    operations = [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    groups: dict[str, list[str]] = {title: [] for title in _GROUPS}
    for name, operation in operations:
        path = name.partition(" ")[2]
        title = next(title for title, begins in _GROUPS.items() if path.startswith(begins))
        groups[title].append(_operation(name, operation))
    routes = "".join(f"<div class=group><h2>{title}</h2>{''.join(its)}</div>" for title, its in groups.items() if its)
    bodies = "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_fields(schema)}</details>'
        for name, schema in document["components"]["schemas"].items()
    )
    errors = operations[0][1]["responses"].items()  # those of all routes
    rows = [f"<tr><td>{status}</td><td>{escape(error['description'])}</td></tr>" for status, error in errors]
    refusals = f'<div class="scroll"><table>{"".join(rows[1:])}</table></div>'
    bodies = f"<div class=group><h2>Bodies</h2>{bodies}</div>"
    return html_page(
        "API", f"{_ABOUT}{routes}{bodies}<h2>Errors of any route</h2>{refusals}{_text('dashboard', 'docs.html')}"
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
    parts.append(_trial(name, operation))
    return f"<details><summary>{_code(name)} {about}</summary>{''.join(parts)}</details>"


def _trial(name: str, operation: Mapping[str, Any]) -> str:
    """Return a form that calls the route, unless it takes a file."""
    method, _, path = name.partition(" ")
    content = operation.get("requestBody", {}).get("content", {})
    if "multipart/form-data" in content:
        return ""
    inputs = [given["name"] for given in operation.get("parameters", ()) if given["in"] == "path"]
    fields = "".join(f'<label>{escape(name)} <input name="{escape(name)}"></label> ' for name in inputs)
    if content:
        example = _EXAMPLES.get(path, {})
        body = dumps(example if path in ("/detokenize", "/v1/batches") else {"model": "MODEL", **example}, indent=1)
        fields += f'<textarea rows="7" aria-label="Body">{escape(body)}</textarea>'
    return f'<form class="try" data-call="{method} {path}">{fields}<button>Try it</button><pre></pre></form>'


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
