"""The launcher that runs each part as a process of this machine."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress

from alignedserve.config.config import Config
from alignedserve.launch.keeper import Keeper
from alignedserve.launch.plan import Machine
from alignedserve.safe_path import module_command
from alignedserve.shell.exit_code import ExitCode
from alignedserve.shell.part import PartSpec


class OnThisMachine(Keeper):
    """Keeps every part as a child process."""

    def __init__(self, config: Config, specs: Sequence[PartSpec], machine: Machine) -> None:
        super().__init__(config, specs)
        self._machine = machine
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, spec: PartSpec) -> None:
        process = subprocess.Popen(
            module_command("alignedserve.launch.start", spec.name),  # the name is for readers of `ps`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the launcher only
        )
        waiting = threading.Thread(target=self._wait, args=(spec, process), name=f"wait-{spec.name}", daemon=True)
        try:
            waiting.start()
        except RuntimeError:  # a full machine gives no thread: nobody would hear of the end of the process
            process.kill()
            process.wait()
            raise
        self._processes[spec.name] = process
        self.began(spec.name)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            process.stdin.write(spec.to_json().encode() + b"\n")
            process.stdin.flush()  # it stays open: its end tells the part that the launcher has gone

    def _wait(self, spec: PartSpec, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        assert process.stdout is not None
        self.ended(spec, code, process.stdout.read().decode() if code == ExitCode.USER_ERROR else "")

    def another(self, spec: PartSpec) -> PartSpec:
        return self._machine.place(spec)

    def forget(self, part: str) -> None:
        self._machine.leave(part)

    def ask_to_stop(self, parts: Collection[str]) -> None:
        for part in self._processes.keys() & parts:
            self._processes[part].terminate()

    def end(self, part: str) -> None:
        if part in self._processes:  # or it could never be started
            self._processes[part].kill()
            self._processes[part].wait()
