"""Small pages in HTML that load nothing else: / chats with what runs here, /docs shows and tries the API.

The answer of / needs no key, so a server with keys names no model there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from json import dumps
from typing import Any

from jinja2 import Environment, Template
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
        page = _template("front.html").render(version=version, models=() if has_keys else models, links=_LINKS)
        answer = html_answer(html_page(_NAME, page))
    else:
        served = {} if has_keys else {"version": version, "models": list(models)}
        links = {path.rpartition("/")[2].removesuffix(".json"): path for path in _LINKS}
        answer = JSONResponse({"name": _NAME, **served, "links": links})
    answer.headers["Vary"] = "Accept"
    return answer


_TEMPLATES = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)


@cache
def _template(name: str) -> Template:
    """Return a template of the folder dashboard, compiled once: that takes milliseconds."""
    return _TEMPLATES.from_string(_text("dashboard", name))


@cache
def _text(folder: str, name: str) -> str:
    return files(f"alignedserve.{folder}").joinpath(name).read_text(encoding="utf-8")


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
    """Return the page of an OpenAPI document: its routes in groups, each with a form that calls it, and its bodies."""
    groups: dict[str, list[tuple[str, Any, str]]] = {title: [] for title in _GROUPS}
    errors: dict[str, str] = {}  # those of all routes
    for path, methods in document["paths"].items():
        title = next(title for title, begins in _GROUPS.items() if path.startswith(begins))
        example = _EXAMPLES.get(path, {})
        body = example if path in ("/detokenize", "/v1/batches") else {"model": "MODEL", **example}
        for method, operation in methods.items():
            groups[title].append((f"{method.upper()} {path}", operation, dumps(body, indent=1)))
            errors = {status: one["description"] for status, one in operation["responses"].items() if status != "200"}
    schemas = document["components"]["schemas"]
    return html_page("API", _template("docs.html").render(groups=groups, errors=errors, schemas=schemas))
