"""Third-party clients, each in a virtual environment of its own, kept from run to run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.conftest import SOAK
from tests.end_to_end.deployment import GONE_S, MARK, marked, wait_until

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "build" / "third_party"
SCRIPTS = Path(__file__).parent / "scripts"
INSTALL_S = 1800.0
SCRIPT_S = 600.0  # some clients take a minute to be imported
_LOG_TAIL = 4_000

ONLY_IN_SOAK = pytest.mark.skipif(not SOAK, reason="installs other people's clients from the index: `make soak` does")


@dataclass(frozen=True)
class Environment:
    name: str
    pins: tuple[str, ...]  # packages that these depend on are as new as a user would get them today

    def run(self, script: str, *arguments: str, home: Path) -> Any:
        """Return the JSON that a script writes. The script sees no settings of the user, and must leave no process
        behind."""
        mark = uuid4().hex
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8"}
        env |= {"HF_HUB_OFFLINE": "1", MARK: mark}
        # some clients rename their processes, and would write the name over their environment
        env |= {"SPT_NOENV": "1"}
        said, logged = home / "said.json", home / "log.txt"
        command = [str(self._interpreter()), str(SCRIPTS / script), *arguments]
        try:
            with said.open("wb") as stdout, logged.open("wb") as stderr:
                subprocess.run(command, cwd=home, env=env, stdout=stdout, stderr=stderr, timeout=SCRIPT_S, check=True)
            wait_until(lambda: not marked(mark), GONE_S, lambda: f"{marked(mark)} are left")
            return json.loads(said.read_text(encoding="utf-8"))
        except BaseException:
            print(logged.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:])
            raise
        finally:
            for pid in marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _interpreter(self) -> Path:
        """Return the Python of this environment, and make the environment if it is missing, has other pins, or another
        Python."""
        folder = ENVIRONMENTS / self.name
        python, ready = folder / "bin" / "python", folder / "ready"
        made_of = "\n".join([*self.pins, sys.version])
        if not ready.exists() or ready.read_text(encoding="utf-8") != made_of:
            shutil.rmtree(folder, ignore_errors=True)
            _install(sys.executable, "-m", "venv", str(folder))
            # most of the installed code is never imported
            quietly = "--quiet", "--disable-pip-version-check", "--no-compile"
            _install(str(python), "-m", "pip", "install", *quietly, *self.pins)
            ready.write_text(made_of, encoding="utf-8")
        return python


def _install(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-_LOG_TAIL:]}\n{done.stderr[-_LOG_TAIL:]}"
