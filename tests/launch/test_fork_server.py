"""What a fork server does for its launcher, and what is left when one of them is killed.

Each test is a program of its own: a process that forks should have no threads, and pytest may.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GONE_S = 60.0
PRELUDE = """
import os, signal, sys, threading, time
from alignedserve.launch import fork_server
from alignedserve.launch.fork_server import ForkServer, ForkServerGone, adopt_orphans, rename

def nothing(): ...

def reads_on(request):
    os.write(1, b"here")
    while os.read(0, 100): ...
    return 9

def forks(server, request="a part"):
    try:
        return server.fork(request)
    except (ForkServerGone, OSError) as error:
        return f"{type(error).__name__} {error.args[0]}"

assert adopt_orphans()
"""


def said_by(program: str) -> str:
    """Return what the program prints."""
    done = subprocess.run([sys.executable, "-c", PRELUDE + program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def running(program: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run the program, and yield it with the process ids that it prints."""
    with subprocess.Popen([sys.executable, "-c", PRELUDE + program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        try:
            yield process, pids
        finally:
            process.kill()


def lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_the_launcher_learns_how_each_process_ended() -> None:
    said = said_by("""
def main(request):
    match request:
        case "returns": return 7
        case "exits": sys.exit(5)
        case "is killed": os.kill(os.getpid(), signal.SIGKILL)
        case "waits":
            time.sleep(600)
    raise ValueError(request)

server = ForkServer.begin("a server", nothing, main)
waits = server.fork("waits")
codes = [server.fork(request).wait() for request in ("returns", "exits", "is killed", "raises")]
waits.terminate()
print(codes, waits.wait(), waits.wait())
waits.kill()  # its pid may be another's by now
""")
    assert said == f"[7, 5, {-signal.SIGKILL}, 1] {-signal.SIGTERM} {-signal.SIGTERM}\n"


def test_a_process_outlives_its_fork_server_and_the_launcher_still_hears_of_its_end() -> None:
    said = said_by("""
server = ForkServer.begin("a server", nothing, reads_on)
part = server.fork("a part")
part.stdout.read(4)
os.kill(server.pid, signal.SIGKILL)
print(forks(server))
part.stdin.close()
print(part.wait())
server.close()
""")
    gone, code = said.splitlines()
    assert gone.startswith("ForkServerGone")
    assert code == "9"


def test_a_fork_server_that_is_killed_or_closed_while_it_loads_keeps_nobody_waiting() -> None:
    said = said_by("""
for end in (lambda server: os.kill(server.pid, signal.SIGKILL), ForkServer.close):
    server = ForkServer.begin("a server", lambda: time.sleep(600), reads_on)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(forks(server)))
    asking.start()
    end(server)
    asking.join()
    print(answers)
""")
    assert all("ForkServerGone" in line for line in said.splitlines())
    assert len(said.splitlines()) == 2


def test_a_fork_server_that_is_killed_while_it_forks_leaves_no_traceback() -> None:
    program = """
def kills_it_between():
    server, fork = os.getpid(), fork_server._fork
    def forked():
        if os.getpid() != server:
            os.kill(server, signal.SIGKILL)
        return fork()
    fork_server._fork = forked

server = ForkServer.begin("a server", kills_it_between, lambda request: 0)
print(forks(server))
"""
    done = subprocess.run([sys.executable, "-c", PRELUDE + program], capture_output=True, text=True, check=False)
    assert "ForkServerGone" in done.stdout
    assert done.stderr == ""


def test_a_fork_server_that_stands_still_is_given_up() -> None:
    said = said_by("""
fork_server.ANSWER_S = 0.2
server = ForkServer.begin("a server", nothing, reads_on)
part = server.fork("a part")
os.kill(server.pid, signal.SIGSTOP)
print(forks(server))
server.close()
server.close()
part.stdin.close()
print(part.wait())
""")
    gone, code = said.splitlines()
    assert gone.startswith("ForkServerGone")
    assert code == "9"


def test_a_fork_server_that_stands_still_while_it_loads_is_given_up() -> None:
    said = said_by("""
fork_server.QUIET_S = 0.2
server = ForkServer.begin("a server", lambda: time.sleep(600), reads_on)
print(forks(server))
server.close()
""")
    assert said.startswith("ForkServerGone")


def test_a_load_that_fails_is_said_and_ends_the_fork_server() -> None:
    program = "server = ForkServer.begin('a server', lambda: 1 / 0, reads_on)\nprint(forks(server))"
    done = subprocess.run([sys.executable, "-c", PRELUDE + program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ForkServerGone")
    assert "ZeroDivisionError" in done.stderr


def test_a_launcher_that_is_killed_takes_its_fork_servers_with_it_and_closes_the_input_of_their_processes() -> None:
    program = """
loaded, loads = [ForkServer.begin("a server", load, reads_on) for load in (nothing, lambda: time.sleep(600))]
part = loaded.fork("a part")
print(loaded.pid, loads.pid, part.pid, flush=True)
time.sleep(600)
"""
    with running(program) as (launcher, pids):
        assert all(map(lives, pids))
        launcher.kill()
        until = time.monotonic() + GONE_S
        while any(map(lives, pids)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(lives, pids))


def test_a_long_load_gives_signs_of_life() -> None:
    """The load goes on until the launcher has heard that it moves."""
    said = said_by("""
import tempfile, types
heard = tempfile.mktemp()

def load():
    while not os.path.exists(heard):
        sys.modules[f"module-{len(sys.modules)}"] = types.ModuleType("one more")
        time.sleep(0.01)

server = ForkServer.begin("a server", load, lambda _: 0)
print(server.fork("a part", lambda num: open(heard, "w").close()).wait())
os.remove(heard)
""")
    assert said == "0\n"


def test_a_full_machine_is_an_error_of_the_start_and_not_of_the_fork_server() -> None:
    said = said_by("""
fork, failing = os.fork, [2, 1, 0]

def fork_or_fail():
    if failing[-1] == 0:
        failing.pop()
        raise OSError(11, "no process")
    failing[-1] -= 1
    return fork()

def load():
    fork_server.os.fork = fork_or_fail

server = ForkServer.begin("a server", load, lambda _: 3)
print(forks(server), forks(server), forks(server))
""")
    assert said.startswith("BlockingIOError 11 BlockingIOError 11 "), "of the process between, and of the part"


def test_a_process_has_its_own_session_title_chance_and_files() -> None:
    said = said_by("""
import random, uuid

def main(request):
    rename(f"alignedserve: {request}")
    files = [os.readlink(f"/proc/self/fd/{name}") for name in sorted(os.listdir("/proc/self/fd"), key=int)[:-1]]
    shown = open("/proc/self/cmdline").read().strip(chr(0)), open("/proc/self/comm").read().strip()
    told = os.getsid(0) == os.getpid(), len(files), len(set(files[:2])), int(signal.getsignal(signal.SIGTERM))
    chance = random.random(), uuid.uuid4()
    print(*shown, *told, *chance, len(os.listdir("/proc/self/task")), sep="|", flush=True)
    return 0

server = ForkServer.begin("a server", nothing, main)
for name in ("decode-0", "decode-0-rank-1"):
    print(server.fork(name).stdout.read().decode(), end="")
""")
    first, second = (line.split("|") for line in said.splitlines())
    assert first[:2] == ["alignedserve: decode-0", "decode-0"]
    assert second[:2] == ["alignedserve: decode-0-rank-1", "decode-0-rank-1"]
    for line in (first, second):
        assert line[2:6] == ["True", "3", "2", str(int(signal.SIG_DFL))]
        assert line[-1] == "1", "it has a thread of the process that forked it"
    assert first[6] != second[6]
    assert first[7] != second[7]


def test_workers_are_forked_without_threads_without_a_gpu_and_compute() -> None:
    """The library of OpenMP would hang where its threads had begun before the fork."""
    said = said_by("""
from functools import partial
from alignedserve.core import WORKERS
from alignedserve.launch import start

def main(_):
    num_threads = len(os.listdir("/proc/self/task"))
    torch, numpy = sys.modules["torch"], sys.modules["numpy"]
    torch.set_num_threads(3)
    at = torch.ones(1500, 1500) @ torch.ones(1500, 1500)
    told = num_threads, torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), bool((at == 1500).all())
    print(*told, int((numpy.ones((800, 800)) @ numpy.ones((800, 800)))[0, 0]), os.environ["GOMP_SPINCOUNT"], flush=True)
    return 0

server = ForkServer.begin("a server", partial(start.load, WORKERS), main)
assert "torch" not in sys.modules
for _ in range(2):
    print(server.fork("a worker").stdout.read().decode(), end="")
""")
    spins = os.environ.get("GOMP_SPINCOUNT", "1000")
    assert said == f"1 False False True 800 {spins}\n" * 2
