"""`alignedserve explain`: tells where a request waited, for how long and for whom, as its deployment remembers it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx

from alignedserve.cli.remote.status import StatusError, asking


@dataclass(frozen=True)
class ExplainOptions:
    request: str
    url: str
    api_key: str | None = None
    as_json: bool = False
    perfetto: Path | None = None


def run(options: ExplainOptions) -> int:
    path = f"/v1/requests/{quote(options.request, safe='')}/timeline"
    form = "perfetto" if options.perfetto else "json" if options.as_json else "text"
    with asking(options.url, options.api_key) as http:
        told = _answer(http, path, form)
    if options.perfetto is None:
        print(told.rstrip("\n"))
        return 0
    try:
        options.perfetto.write_text(told, encoding="utf-8")
    except OSError as error:
        raise StatusError(f"{options.perfetto} cannot be written: {error.strerror}") from None
    print(f"{options.perfetto}: open it at https://ui.perfetto.dev")
    return 0


def _answer(http: httpx.Client, path: str, form: str) -> str:
    try:
        answer = http.get(path, params={"format": form})
    except httpx.HTTPError as error:
        raise StatusError(f"nothing answers at {http.base_url}: {error}") from error
    if answer.status_code == httpx.codes.OK:
        return answer.text
    raise StatusError(f"{http.base_url} answers {answer.status_code}: {_message(answer)}")


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
