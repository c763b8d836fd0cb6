"""A deployment that Python code starts and ends: the same parts as `alignedserve serve` starts."""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from alignedserve.cli.foreign import meant_by
from alignedserve.errors import DeploymentError
from alignedserve.safe_path import module_command

Setting: TypeAlias = str | int | float | bool | Path | None

_STOP_S = 60.0  # for requests that are open, before the deployment is cut off
_READY = b"try: "  # in the greeting, after the address
_LAST_LINES = 20  # of its log, in the error of a deployment that does not start


class Deployment:
    """`alignedserve serve` in processes of its own, on a free port of this machine.

    with Deployment("smollm2", topology="1+1", max_model_len=512) as deployment:
        openai.OpenAI(base_url=deployment.url + "/v1", api_key="none")

    Each keyword is a flag of `alignedserve serve`, with underscores; `settings` are those of its --set. A deployment
    ends with its block, with `stop`, or with this process, however that ends.
    """

    def __init__(
        self, model: str | Path = "auto", *, settings: Mapping[str, Setting] | None = None, **flags: Setting
    ) -> None:
        """Start it, and return when it takes requests. Raises DeploymentError with the reason where it cannot."""
        for name in flags:
            if said := meant_by(_flag(name)):  # in the words of keywords
                here = re.sub("--[a-z-]+", lambda found: found[0][2:].replace("-", "_"), said)
                raise DeploymentError(f"{name} is not understood{here}")
        self._log = tempfile.NamedTemporaryFile(prefix="alignedserve-", suffix=".log")  # noqa: SIM115 (till it stops)
        command = module_command("alignedserve.api.started", "serve", str(model), *_arguments(settings or {}, flags))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for this process, which ends the deployment as it ends itself
        )
        atexit.register(self.stop)
        try:
            found = re.search(r"https?://[^\s/]+", self._greeting().decode())
            assert found is not None
            self.url = found[0]
        except BaseException:
            self.stop()
            raise

    @property
    def log(self) -> str:
        """Return what its parts have logged."""
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace") if not self._log.closed else ""

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End the deployment: open requests get their outputs first. Nothing happens where it has ended."""
        atexit.unregister(self.stop)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except BaseException as error:  # Ctrl-C too: the parts see that their launcher has gone, and end
            self._process.kill()
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        finally:
            self._log.close()

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _greeting(self) -> bytes:
        """Return what the deployment prints when it takes requests; from then on a thread reads what else comes."""
        assert self._process.stdout is not None
        out, read = self._process.stdout.fileno(), b""
        while _READY not in read:
            new = os.read(out, 4096)
            if not new:
                self._process.wait()
                raise DeploymentError(self._reason())
            read += new
        threading.Thread(target=self._process.stdout.read, name="greeting", daemon=True).start()
        return read

    def _reason(self) -> str:
        """Return why it does not start: the line that `alignedserve serve` says, or the end of its log."""
        lines = self.log.splitlines()
        said = [line for line in lines if line.startswith("alignedserve: ")]
        return said[-1].removeprefix("alignedserve: ") if said else "\n".join(lines[-_LAST_LINES:])


def _arguments(settings: Mapping[str, Setting], flags: Mapping[str, Setting]) -> list[str]:
    arguments = [] if "port" in flags else ["--port", "0"]
    for name, value in flags.items():
        if value is not None:
            arguments += [_flag(name), text_of(value)]
    for path, value in settings.items():
        arguments += ["--set", f"{path}={text_of(value)}"]
    return arguments


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def text_of(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
