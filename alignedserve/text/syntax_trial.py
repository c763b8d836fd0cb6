"""Try a client's syntax in a process of its own, which may use little time and memory, and which may die.

    gateway, job runner                       this module as a child
    SyntaxTrial.find_fault ── a line of JSON ──▶ compiles the syntax, and asks it for masks
                           ◀── fault, CPU time ─ or nothing, where it dies
    SyntaxTrial.of_gbnf    ── a line of JSON ──▶ makes a syntax of rules in llama.cpp's language
                           ◀── fault, CPU time and syntax

A syntax of a hundred bytes may take gigabytes to compile (a large `multipleOf`), and a chain of some thousand `$ref`
overflows the stack of llguidance, which ends the process. A worker compiles what was tried here and found good, with
twice the stack. For a schema of eight properties a trial takes 1.0 ms, 0.3 of them for masks behind the first, and 7 µs
where it has been tried before.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import IO

from alignedserve.errors import ModelError
from alignedserve.safe_path import module_command
from alignedserve.text.syntax import Syntaxes, gbnf_syntax

# The limits of a trial. A worker compiles the same syntax again, beside its steps: 500 properties take 0.02 s.
MOST_CPU_S = 2
MOST_BYTES = 512 << 20
_STACK_BYTES = 4 << 20  # a worker's threads have 8 MB
_MOST_S = 60.0  # for an answer, however busy the machine is
_MOST_KNOWN = 256  # answers that are kept: clients send the same few schemas again and again

_TOO_LONG = f"to prepare it takes more than {MOST_CPU_S} s of a processor: make it smaller"
_TOO_LARGE = f"to prepare it takes more than {MOST_BYTES >> 20} MB of memory: make it smaller"
_TOO_DEEP = "its parts lead to each other in a chain that is too long"
_DEATHS: dict[int, str] = {
    signal.SIGXCPU: _TOO_LONG,
    signal.SIGABRT: _TOO_LARGE,
    signal.SIGSEGV: _TOO_DEEP,
    signal.SIGBUS: _TOO_DEEP,
}


@dataclass
class Tried:
    """The trials that a caller's body has caused: the processor time of each."""

    caller: str = ""
    cpu_s: list[float] = field(default_factory=list)


class SyntaxTrial:
    """Tries syntaxes for one model's tokens, one at a time; several threads may ask.

    What was tried is known to its caller alone: a trial that is left out would tell another that it was tried."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._trying, self._looking = folder, Lock(), Lock()
        self._child: subprocess.Popen[bytes] | None = None  # started by the first syntax
        self._known: OrderedDict[bytes, str] = OrderedDict()  # by a hash of caller and syntax; an empty fault is none

    def find_fault(self, syntax: str, tried: Tried) -> str | None:
        """Return why an output cannot follow the syntax, or None if it can; note what a trial took, if there is one."""
        name = blake2b(f"{tried.caller}\0{syntax}".encode(errors="surrogatepass"), digest_size=16).digest()
        fault = self._recall(name)  # what is known waits for no trial
        if fault is None:
            with self._trying:
                fault = self._recall(name)  # another thread may have tried it meanwhile
                if fault is None:
                    found, cpu_s = self._try(syntax)
                    tried.cpu_s.append(cpu_s)
                    fault = found or ""
                    with self._looking:
                        self._known[name] = fault
                        if len(self._known) > _MOST_KNOWN:
                            self._known.popitem(last=False)
        return fault or None

    def of_gbnf(self, rules: str, tried: Tried) -> str:
        """Return the syntax of rules in llama.cpp's language; raise ValueError where there is none."""
        with self._trying:
            fault, cpu_s, syntax = self._ask(rules, is_gbnf=True)
        tried.cpu_s.append(cpu_s)
        if fault is not None:
            raise ValueError(fault)
        return syntax

    def _recall(self, name: bytes) -> str | None:
        with self._looking:
            if name in self._known:
                self._known.move_to_end(name)
            return self._known.get(name)

    def _try(self, syntax: str) -> tuple[str | None, float]:
        return self._ask(syntax, is_gbnf=False)[:2]

    def _ask(self, text: str, is_gbnf: bool) -> tuple[str | None, float, str]:
        """Return the fault, and the processor time of the trial: all that it may use where it ended the child, which
        then has to start again; and the syntax of rules."""
        for _ in range(2):  # a child may have been killed while it had nothing to do
            child = self._child or self._start()
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps([text, is_gbnf]).encode() + b"\n")
                child.stdin.flush()
                fault, cpu_s, syntax = json.loads(_answer(child))
                return fault, cpu_s, syntax
            except TimeoutError:
                self._end()
                raise ModelError("the process that tries grammars gets no time on this machine: try again") from None
            except (BrokenPipeError, EOFError):
                status = child.wait(_MOST_S)
                self._end()
                if -status in _DEATHS:
                    return _DEATHS[-status], float(MOST_CPU_S), ""
        raise ModelError("the process that tries grammars was ended twice: try again")

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the child; it is not in the terminal's foreground, so that Ctrl-C lets open requests end."""
        command = module_command("alignedserve.text.syntax_trial", str(self.folder))
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        try:
            fault = json.loads(_answer(self._child))
        except (EOFError, TimeoutError):
            self._end()
            raise ModelError("the process that tries grammars does not start: its log says why") from None
        if fault is not None:
            self._end()
            raise ModelError(fault)
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def _answer(child: subprocess.Popen[bytes]) -> bytes:
    """Return the child's next line; raise EOFError if it has died, TimeoutError if it does not answer."""
    assert child.stdout is not None
    line, until = b"", time.monotonic() + _MOST_S
    while not line.endswith(b"\n"):
        there, _, _ = select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))
        if not there:
            raise TimeoutError
        read = os.read(child.stdout.fileno(), 1 << 16)
        if not read:
            raise EOFError
        line += read
    return line


# --- The child


def main() -> None:
    (folder,) = sys.argv[1:]
    syntaxes = Syntaxes(Path(folder))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        syntaxes.load()
    except ModelError as error:
        _say(answers, str(error))
        return
    _say(answers, None)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")  # where the system tells the memory in use: a limit on what comes on top
    if statm.exists():
        data = int(statm.read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + MOST_BYTES, resource.RLIM_INFINITY))
    with open(os.devnull, "wb") as nowhere:  # how the process dies is said by its parent, in a line
        os.dup2(nowhere.fileno(), 2)
    threading.stack_size(_STACK_BYTES)
    server = threading.Thread(target=_serve, args=(syntaxes, answers))
    server.start()
    server.join()


def _serve(syntaxes: Syntaxes, answers: IO[bytes]) -> None:
    for line in sys.stdin.buffer:
        began = time.process_time()  # a trial's time counts from here; the limit is in whole seconds
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(began) + 1 + MOST_CPU_S, hard))
        (text, is_gbnf), fault, syntax = json.loads(line), None, ""
        try:
            if is_gbnf:
                syntax = gbnf_syntax(text)
            else:
                fault = syntaxes.find_fault(text)
        except ValueError as error:
            fault = str(error)
        _say(answers, (fault, time.process_time() - began, syntax))


def _say(answers: IO[bytes], answer: object) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
