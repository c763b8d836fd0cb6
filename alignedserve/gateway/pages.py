"""Small pages in HTML that load nothing else: / chats with what runs here, /docs shows and tries the API.

The answer of / needs no key, so a server with keys names no model there.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from html import escape
from importlib.resources import files
from json import dumps
from typing import Any, ClassVar, NamedTuple

from jinja2 import Environment, Template
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from alignedserve.dashboard.page import policy
from alignedserve.gateway.openai.errors import overloaded
from alignedserve.gateway.openai.streaming import WatchedStream, in_turns


def html_page(title: str, body: str) -> str:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_text("gateway", "pages.css")}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>'


HTML, JSON = "text/html", "application/json"
MOST_PLAIN = 64  # pages that are sent at once as they are: their clients need no key, and may read nothing
_STALL_S = 10.0  # in which such a client must read some
_PIECE_BYTES = 16 << 10


class _EncodedPage(NamedTuple):
    pieces: tuple[bytes, ...]
    packed: bytes  # by gzip: a fifth, which fits into what the kernel holds of a connection
    headers: Mapping[str, str]


@lru_cache(maxsize=16)
def _encoded(page: str, kind: str) -> _EncodedPage:
    """Return a page as it is sent, made once: its policy and packing take milliseconds."""
    headers = {
        **({"Content-Security-Policy": policy(page)} if kind == HTML else {}),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Vary": "Accept, Accept-Encoding",
    }
    data = page.encode()
    pieces = tuple(data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))
    return _EncodedPage(pieces, gzip.compress(data, mtime=0), headers)


class _PlainPage(WatchedStream):
    num_open: ClassVar[int] = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _PlainPage.num_open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            _PlainPage.num_open -= 1


def page_answer(page: str, http: HttpRequest, kind: str = HTML) -> Response:
    """Answer with a page: packed, as each browser takes it; else in pieces, as the client reads them, and to few."""
    encoded = _encoded(page, kind)
    if "gzip" in http.headers.get("accept-encoding", ""):
        return Response(encoded.packed, headers={**encoded.headers, "Content-Encoding": "gzip"}, media_type=kind)
    if _PlainPage.num_open >= MOST_PLAIN:
        raise overloaded("as many pages are being sent as the server sends at once: try again, or accept gzip")
    size = sum(map(len, encoded.pieces))
    return _PlainPage(in_turns(encoded.pieces), _STALL_S, num_bytes=size, headers=encoded.headers, media_type=kind)


_NAME = "AlignedServe"
_LINKS = {
    "/docs": "every route, with its parameters, body and answers, to be tried",
    "/openapi.json": "the same for programs",
    "/v1/models": "which models answer",
    "/dashboard": "the live page: promises, load, requests, keys, processes, jobs",
    "/metrics": "for Prometheus",
    "/health": "whether requests are served; /live says whether this process answers",
}


def front_answer(
    http: HttpRequest, version: str, models: Sequence[str], has_keys: bool, is_chat: bool = True
) -> Response:
    """Answer with a page where a browser asks for one, and with JSON otherwise. `is_chat`: the model has a template."""
    if "text/html" in http.headers.get("accept", ""):
        script = _text("dashboard", "markdown.js") + _text("dashboard", "chat.js")  # one, as the policy allows one
        shown = {"version": version, "models": () if has_keys else models, "links": _LINKS, "is_chat": is_chat}
        page = _template("front.html").render(**shown, script=script)
        return page_answer(html_page(_NAME, page), http)
    served = {} if has_keys else {"version": version, "models": list(models)}
    links = {path.rpartition("/")[2].removesuffix(".json"): path for path in _LINKS}
    return JSONResponse({"name": _NAME, **served, "links": links}, headers={"Vary": "Accept"})


_TEMPLATES = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)


@cache
def _template(name: str) -> Template:
    """Return a template of the folder dashboard, compiled once: that takes milliseconds."""
    return _TEMPLATES.from_string(_text("dashboard", name))


@cache
def _text(folder: str, name: str) -> str:
    return files(f"alignedserve.{folder}").joinpath(name).read_text(encoding="utf-8")


_GROUPS = {  # heading -> how the paths of its routes begin
    "Chats and texts": ("/v1/chat", "/v1/comp", "/v1/fim", "/infill", "/completion", "/v1/responses", "/v1/messages"),
    "Batch jobs": ("/v1/files", "/v1/batches"),
    "Vectors and ranks": ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"),
    "Tokens, models, adapters": ("/tokenize", "/detokenize", "/v1/models", "/v1/load", "/v1/unload"),
    "Operating": ("/",),
}
_SAID = {"messages": [{"role": "user", "content": "Name three planets."}]}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _SAID,
    "/v1/completions": {"prompt": "The three largest planets are", "max_tokens": 16},
    "/v1/fim/completions": {"prompt": "def double(x):\n    return ", "suffix": "\n", "max_tokens": 16},
    "/infill": {"input_prefix": "def double(x):\n    return ", "input_suffix": "\n", "n_predict": 16},
    "/completion": {"prompt": "The three largest planets are", "n_predict": 16},
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
