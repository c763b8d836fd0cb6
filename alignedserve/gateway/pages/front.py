"""The answer of /: what runs here, and where to go on. It needs no key, so a server with keys names no model there."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.gateway.pages.html import html_answer, html_page

_NAME = "AlignedServe"
_LINKS = {
    "/docs": "every route, with its parameters, body and answers",
    "/openapi.json": "the same for programs",
    "/v1/models": "which models answer",
    "/dashboard": "the live page: parts, queues, batches, the pool, jobs, slow and refused requests",
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
    return html_page(_NAME, f'<p>{served}</p><div class="scroll"><table>{rows}</table></div>')
