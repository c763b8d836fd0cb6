"""What the user of a launcher sees: its slowest part while it starts, and how to ask once it takes requests."""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TextIO
from urllib.parse import urlsplit

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.model_source import DEMO_FOLDER, name_of
from alignedserve.architectures.template_file import template_source
from alignedserve.config.config import Config
from alignedserve.config.sections import ServerConfig
from alignedserve.core import Slo
from alignedserve.progress import ProgressBar
from alignedserve.signs import Sign
from alignedserve.sizing.model_folder import model_folder

log = logging.getLogger("alignedserve.launch")

READY_LOOK_S = 0.05  # between two looks at whether it takes requests
_PROMISE_S = 1.0  # that the greeting waits at most for what the workers can promise
_WIDTH = 20  # of the bar: it is shorter than lines of the log, which parts write over it
_LINE_S = 10.0  # between two lines of the log: a start that is shorter has none


class StartScreen:
    def __init__(self, file: TextIO, is_for_people: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Show a bar if the file is a terminal and lines of the log are for people, or else write lines."""
        self._bar = ProgressBar("alignedserve:", file) if is_for_people and file.isatty() else None
        self._clock, self._is_drawn = clock, False
        self._next_at, self._line = clock() + _LINE_S, ""

    def show(self, sign: Sign | None) -> None:
        """Show what the slowest part does; None where no part is starting."""
        if sign is None:
            return self.clear()
        text = f"{sign.part} {sign.stage.value}"
        if self._bar is not None:
            self._is_drawn = True
            full = int(_WIDTH * sign.share)
            drawn = f" [{'#' * full}{'.' * (_WIDTH - full)}]" if sign.total else ""
            return self._bar.tell(f"{text}{drawn} {sign.amount}\r")  # the next line of a log begins where the bar does
        line = f"{text}: {sign.amount}" if sign.amount else text
        if self._clock() >= self._next_at and line != self._line:
            log.info("starting: %s", line)
            self._next_at, self._line = self._clock() + _LINE_S, line
        return None

    def clear(self) -> None:
        if self._bar is not None and self._is_drawn:
            self._bar.clear()
            self._is_drawn = False


def url_of(config: Config) -> str:
    """Return the address at which a client on this machine reaches the gateway."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.server.host, config.server.host)
    scheme = "http" if config.server.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.server.port}"


def announce_when_ready(config: Config, announce: Callable[[str], None]) -> None:
    """Hand on a greeting as soon as the deployment takes requests, and tell the service manager. A thread waits for
    that, however long it takes."""

    def wait() -> None:
        while not is_ready(config):  # asked again and again, as by a client: no part can answer for all others
            time.sleep(READY_LOOK_S)
        _tell_service_manager()
        announce(_greeting(config))

    threading.Thread(target=wait, name="ready", daemon=True).start()


def _tell_service_manager() -> None:
    """Report that it is ready, as systemd wants it of a service of `Type=notify`; without a manager do nothing."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith("@"):  # not in the file system
        address = f"\0{address[1:]}"
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        if address:
            manager.sendto(b"READY=1", address)


def is_ready(config: Config) -> bool:
    """Return whether the gateway answers that the deployment takes requests."""
    return _ready(config) is not None


def _ready(config: Config) -> dict[str, Any] | None:
    """Return what the gateway answers once the deployment takes requests; None before."""
    address = urlsplit(url_of(config))
    assert address.hostname is not None
    connect = http.client.HTTPConnection
    if address.scheme == "https":  # our own port: its name need not be in the certificate
        connect = partial(http.client.HTTPSConnection, context=ssl._create_unverified_context())
    connection = connect(address.hostname, address.port, timeout=2)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        text = answer.read()
        return json.loads(text or "{}") if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _promise(config: Config) -> str:
    """Return the greeting's line of what chats are promised. A worker tells the gateway at about the time when both
    are ready, so a gateway that knows nothing yet is asked again."""
    ends_at = time.monotonic() + (_PROMISE_S if config.engine.profile_s else 0.0)
    while (told := (_ready(config) or {}).get("promise")) is None and time.monotonic() < ends_at:
        time.sleep(READY_LOOK_S)
    ttft_ms = told["ttft_ms"] if told else config.slo.ttft_ms or 1e3 * Slo().ttft_s
    tbt_ms = told["tbt_ms"] if told else config.slo.tbt_ms or 1e3 * Slo().tbt_s
    promise = f"promise: {Slo(ttft_ms / 1e3, tbt_ms / 1e3).in_words}"
    if config.slo.ttft_ms is not None or config.slo.tbt_ms is not None:
        return f"{promise}\n"
    line = f"line: chats beyond that wait in order, up to {config.server.patience_s:g} s (--patience-s)"
    return f"{promise} (what this machine keeps; --slo-ttft-ms asks for less)\n{line}\n"


def _greeting(config: Config) -> str:
    model = config.model_names[0]
    path = "chat/completions"
    folder = model_folder(config)
    asked = "Count from 3 to 12." if folder == DEMO_FOLDER else "What is the capital of France?"
    body = (
        f'{{"model": "{model}", "stream": true, "temperature": 0, "max_tokens": 200,'
        f' "messages": [{{"role": "user", "content": "{asked}"}}]}}'
    )
    shapes = read_config(folder)
    chats = shapes.generates and template_source(folder) is not None
    if shapes.labels:
        path, body = "score", f'{{"model": "{model}", "text_1": "What counts?", "text_2": "Numbers count."}}'
    elif not shapes.generates:
        path, body = "embeddings", f'{{"model": "{model}", "input": "{asked}"}}'
    elif not chats:
        path = "completions"
        body = (
            f'{{"model": "{model}", "stream": true, "temperature": 0, "max_tokens": 50,'
            ' "prompt": "The capital of France is"}'
        )
    has_keys = config.server.api_key or config.server.keys_file
    key = ' -H "Authorization: Bearer $ALIGNEDSERVE_SERVER_API_KEY"' if has_keys else ""
    url = url_of(config)
    chat = f"{url}/ to chat, " if chats else ""
    port = "" if config.server.port == ServerConfig().port else f" --port {config.server.port}"
    embed = "" if config.embed is None else f"embed: {name_of(config.embed)}, by {url}/v1/embeddings\n"
    demo = "demo: a tiny model that can count; its other answers are nonsense\n" if folder == DEMO_FOLDER else ""
    return (
        f"serving {model} on {url}\n{_promise(config) if shapes.generates else ''}"
        f"{embed}{demo}pages: {chat}{url}/dashboard to watch, {url}/docs to try the API\n"
        f"try: curl -N {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'\n"
        f"stop: Ctrl-C, or alignedserve stop{port}"
    )
