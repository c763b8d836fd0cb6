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
    flag,
    flag_of,
    last,
    switch,
    whole,
    zero_or_more,
)
from alignedserve.config.config import settings

HERE = f"http://{settings()['server.host'].default}:{settings()['server.port'].default}"  # with the default address
_path = file  # within a class with a field of the name `file`


def url_flag(about: str, path: str = "") -> Any:
    """Declare the flags --url and --port. If both are given, the later one counts."""

    def add(parser: argparse._ActionsContainer) -> None:
        parser.add_argument("--url", default=f"{HERE}{path}", help=f"{about} (default: %(default)s)")
        here, _, _ = HERE.rpartition(":")
        port = partial(_address, f"{here}:", path)
        more = {"dest": "url", "type": port, "metavar": "N", "default": argparse.SUPPRESS}
        parser.add_argument("--port", help=f"the same, as {here}:N{path}", **more)

    return flag_of(add, f"{HERE}{path}")


def _address(before: str, behind: str, port: str) -> str:
    return f"{before}{whole(1)(port)}{behind}"


def add_ca(parser: argparse._ActionsContainer) -> None:
    about = "certificate of the authority that signed the server's (default: SSL_CERT_FILE)"
    parser.add_argument("--ca", type=file, metavar="FILE", help=about)


def add_key(parser: argparse._ActionsContainer) -> None:
    key = settings()["server.api_key"].variable
    parser.add_argument("--api-key", default=os.environ.get(key), help=f"default: {key}")


@dataclass(frozen=True)
class ChatOptions:
    url: str = url_flag("the API's base", "/v1")
    api_key: str | None = flag_of(add_key)
    ca: Path | None = flag_of(add_ca)
    model: str | None = last(None, "default: the first model that the server lists")
    system: str | None = last("TEXT", "the system prompt")
    max_tokens: int | None = last("N", "longest answer (default: the server's)", type=whole(1))
    temperature: float | None = last("X", "0 for greedy (default: the server's)", type=zero_or_more)


@dataclass(frozen=True)
class StatusOptions:
    url: str = url_flag("address of the deployment")
    api_key: str | None = flag_of(add_key)
    ca: Path | None = flag_of(add_ca)
    wait: float = last("S", "wait at most S seconds until it is ready", 0.0, type=zero_or_more)
    json: bool = switch("as JSON, for programs")


@dataclass(frozen=True)
class ExplainOptions:
    request: str = argument("REQUEST", "x-request-id or id of its answer; request_id of a batch line")
    url: str = url_flag("address of the deployment")
    api_key: str | None = flag_of(add_key)
    ca: Path | None = flag_of(add_ca)
    json: bool = switch("as JSON, for programs")
    perfetto: Path | None = flag("FILE", "write a trace for ui.perfetto.dev", type=_path)


@dataclass(frozen=True)
class BatchOptions:
    url: str = url_flag("the API's base", "/v1")
    api_key: str | None = flag_of(add_key)
    ca: Path | None = flag_of(add_ca)


@dataclass(frozen=True)
class BatchSubmission:
    file: Path = argument("FILE", "a request in each line, in OpenAI's format", type=_path)
    window: str = last("W", "completion window, 10m to 7d (default: %(default)s)", "24h")
    endpoint: str | None = last("PATH", "default: the url of the first line")
    weight: float | None = last("X", "its share beside other batches; only AlignedServe has it", type=above_zero)
    wait: bool = switch("wait until it has ended")
    out: Path | None = flag("FILE", "with --wait: file for the results", type=_path)
