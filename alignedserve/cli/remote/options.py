"""The flags of the commands that talk to a server, each declared once."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from alignedserve.cli.terminal.arguments import (
    above_zero,
    argument,
    file,
    filled,
    flag,
    flag_of,
    last,
    switch,
    whole,
    zero_or_more,
)
from alignedserve.config.config import settings
from alignedserve.loads import defaults

HERE = f"http://{settings()['server.host'].default}:{settings()['server.port'].default}"  # with the default address
_path = file  # within a class with a field of the name `file`


def _url(about: str, path: str = "") -> Any:
    """Declare the flags --url and --port, of which the last counts."""

    def add(parser: argparse._ActionsContainer) -> None:
        parser.add_argument("--url", default=f"{HERE}{path}", help=f"{about} (default: %(default)s)")
        here, _, _ = HERE.rpartition(":")
        port = partial(_address, f"{here}:", path)
        more = {"dest": "url", "type": port, "metavar": "N", "default": argparse.SUPPRESS}
        parser.add_argument("--port", help=f"the same, as {here}:N{path}", **more)

    return flag_of(add, f"{HERE}{path}")


def _address(before: str, behind: str, port: str) -> str:
    return f"{before}{whole(1)(port)}{behind}"


def _add_ca(parser: argparse._ActionsContainer) -> None:
    about = "certificate of the authority that signed the server's (default: SSL_CERT_FILE)"
    parser.add_argument("--ca", type=file, metavar="FILE", help=about)


def _add_key(parser: argparse._ActionsContainer) -> None:
    key = settings()["server.api_key"].variable
    parser.add_argument("--api-key", default=os.environ.get(key), help=f"default: {key}")


@dataclass(frozen=True)
class ChatOptions:
    url: str = _url("the API's base", "/v1")
    api_key: str | None = flag_of(_add_key)
    ca: Path | None = flag_of(_add_ca)
    model: str | None = last(None, "default: the first model that the server lists")
    system: str | None = last("TEXT", "the system prompt")
    max_tokens: int | None = last("N", "longest answer (default: the server's)", type=whole(1))
    temperature: float | None = last("X", "0 for greedy (default: the server's)", type=zero_or_more)


@dataclass(frozen=True)
class StatusOptions:
    url: str = _url("address of the deployment")
    api_key: str | None = flag_of(_add_key)
    ca: Path | None = flag_of(_add_ca)
    wait: float = last("S", "wait at most S seconds until it is ready", 0.0, type=zero_or_more)
    json: bool = switch("as JSON, for programs")


@dataclass(frozen=True)
class ExplainOptions:
    request: str = argument("REQUEST", "x-request-id or id of its answer; request_id of a batch line")
    url: str = _url("address of the deployment")
    api_key: str | None = flag_of(_add_key)
    ca: Path | None = flag_of(_add_ca)
    json: bool = switch("as JSON, for programs")
    perfetto: Path | None = flag("FILE", "write a trace for ui.perfetto.dev", type=_path)


@dataclass(frozen=True)
class BatchOptions:
    url: str = _url("the API's base", "/v1")
    api_key: str | None = flag_of(_add_key)
    ca: Path | None = flag_of(_add_ca)


@dataclass(frozen=True)
class BatchSubmission:
    file: Path = argument("FILE", "a request in each line, in OpenAI's format", type=_path)
    window: str = last("W", "completion window, 10m to 7d (default: %(default)s)", "24h")
    endpoint: str | None = last("PATH", "default: the url of the first line")
    weight: float | None = last("X", "its share beside other batches; only AlignedServe has it", type=above_zero)
    wait: bool = switch("wait until it has ended")
    out: Path | None = flag("FILE", "with --wait: file for the results", type=_path)


@dataclass(frozen=True)
class BenchOptions:
    url: str = flag(None, "its address (default: %(default)s)", HERE, type=filled, group="the server")
    compare: tuple[str, ...] = flag(
        "URL", "more servers, which are asked the same in turns", (), nargs="+", type=filled
    )
    model: str | None = flag(None, "default: the first model that a server lists", type=filled)
    api_key: str | None = flag_of(_add_key)
    ca: Path | None = flag_of(_add_ca)
    workload: str = flag(
        "W",
        "which requests come, when, and what they are promised: a name such as chat or coserve, a file, or a kind such "
        "as trace:FILE, each with ,KEY=VALUE behind it (default: %(default)s)",
        defaults.WORKLOAD,
        type=filled,
        group="the load",
    )
    seed: int = flag("N", "of lengths and times (default: %(default)s)", 0, type=whole(0))
    chat: bool = switch("ask /chat/completions with words, in place of /completions with token ids")
    batch: bool = switch(
        "best-effort requests are the lines of one batch job, in place of requests with service_tier flex"
    )
    rounds: int = flag(
        "N", "run N loads on each server in turns, each with its own seed (default: %(default)s)", 1, type=whole(1)
    )
    warm_up: int = flag(
        "N", "first ask N requests of each stream that do not count (default: %(default)s)", 4, type=whole(0)
    )
    timeout: float = flag(
        "S", "a request ends when its server is silent for so long (default: %(default)g)", 600.0, type=above_zero
    )
    disclose: tuple[str, ...] | None = flag(
        "NAME=TEXT",
        "print the nine facts that Red Hat's suite has every report disclose; of precision, quantization and images "
        "(what the server runs) it knows what is written here",
        nargs="*",
        type=filled,
    )
    json: Path | None = flag(
        "FILE", "all figures, and when each token came", type=_path, group="files that are written"
    )
    csv: Path | None = flag("FILE", "a row for each request", type=_path)
    page: Path | None = flag("FILE", "a page of HTML with a table and plots", type=_path)
    runs: tuple[Path, ...] = flag(
        "RUN",
        "files of --json, whose runs are shown and written in place of measuring",
        (),
        nargs="+",
        type=_path,
        name="--from",
    )

    @property
    def urls(self) -> tuple[str, ...]:
        return self.url, *self.compare
