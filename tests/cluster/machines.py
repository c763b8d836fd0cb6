"""Machines of our own for `ray up`: network namespaces on one wire, each with processes, memory and an sshd of its own.

They need root, and the programs that `missing` checks. They change nothing on this machine but the namespaces, which
are
removed again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

SCRIPT = Path(__file__).with_name("machine.sh")
STARTED_S = 60.0


def missing() -> str | None:
    """Return why there can be no machines here, or None."""
    if os.geteuid() != 0:
        return "it takes root to make network namespaces"
    lacking = [program for program in ("ip", "unshare", "ssh", "ssh-keygen", "sshd", "rsync") if not found(program)]
    if lacking:
        return f"{', '.join(lacking)} missing: apt-get install openssh-server rsync iproute2"
    wire = ["ip", "link", "add", "wire", "type", "veth"]
    tried = subprocess.run(["unshare", "--mount", "--pid", "--net", "--fork", *wire], capture_output=True, text=True)
    return tried.stderr.strip() or None


def found(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Machines:
    """Several machines on one wire. `run` runs on the first one, with a home of its own."""

    def __init__(self, folder: Path, networks: Sequence[str], addresses: Sequence[str]) -> None:
        self.folder, self.networks, self.addresses = folder, networks, addresses
        self.key = folder / "key"
        self.programs: list[subprocess.Popen[bytes]] = []  # of each machine, the first process

    def run(self, *command: str | Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run the command as on a laptop that is not one of the machines, but reaches them all."""
        inside = ["ip", "netns", "exec", self.networks[0], "unshare", "--mount", "sh", "-c"]
        desk = self.folder / "desk"  # keeps what Ray knows of clusters between commands
        desk.mkdir(exist_ok=True)
        home = {"HOME": str(desk), "TMPDIR": str(desk), "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
        whole: list[str | Path] = [*inside, 'mount --bind "$0" /tmp/ray && exec "$@"', desk, *map(str, command)]
        return subprocess.run(whole, env=home, capture_output=True, text=True, timeout=timeout_s)

    def end(self, number: int) -> None:
        """End all that runs on that machine, as when its power fails."""
        self.programs[number].kill()
        self.programs[number].wait()

    def log(self, address: str) -> str:
        """Return the end of the log of the deployment that `ray up` started there."""
        network = self.networks[self.addresses.index(address)]
        said = self.folder / network / "home" / "alignedserve" / "serve.log"
        return said.read_text()[-4000:] if said.exists() else ""

    def processes(self, number: int) -> list[str]:
        """Return the command lines on that machine, except the machine's own programs."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.networks[number]], capture_output=True, text=True, check=True
        ).stdout.split()
        lines = [Path(f"/proc/{pid}/cmdline") for pid in found]
        said = [line.read_text().replace("\0", " ").strip() for line in lines if line.exists()]
        return [line for line in said if line and not any(own in line for own in ("machine.sh", "sshd", " machine "))]


@contextmanager
def machines(folder: Path, addresses: Sequence[str]) -> Iterator[Machines]:
    """Yield a machine for each address."""
    networks = [f"as-{os.getpid()}-{number}" for number in range(len(addresses))]
    made = Machines(folder, networks, addresses)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", made.key], check=True)
    with ExitStack() as stack:
        for network in networks:
            _ip("netns", "add", network)
            stack.callback(_ip, "netns", "del", network)
        first, second = networks
        _ip("link", "add", "wire", "netns", first, "type", "veth", "peer", "name", "wire", "netns", second)
        for network, address in zip(networks, addresses, strict=True):
            _ip("-n", network, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _ip("-n", network, "link", "set", device, "up")
            # a machine learns its own address from this route
            _ip("-n", network, "route", "add", "default", "dev", "wire")
            made.programs.append(stack.enter_context(_sshd(folder / network, network, address, made.key)))
        yield made


@contextmanager
def _sshd(folder: Path, network: str, address: str, key: Path) -> Iterator[subprocess.Popen[bytes]]:
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    (home / ".ssh" / "authorized_keys").write_text(key.with_suffix(".pub").read_text())
    accounts = [
        line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith(("root:", "sshd:"))
    ]
    accounts += [f"root:x:0:0:root:{home}:/bin/bash", "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin"]
    (folder / "passwd").write_text("\n".join(accounts) + "\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "host_key"], check=True)
    settings = [f"ListenAddress {address}", f"HostKey {folder}/host_key", "StrictModes no", "UsePAM no", "PidFile none"]
    (folder / "sshd_config").write_text("\n".join([*settings, "PermitRootLogin prohibit-password"]) + "\n")
    sshd = found("sshd")
    assert sshd is not None
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["sh", SCRIPT, network, folder, sshd], stdout=log, stderr=log)
    try:
        _wait_for(folder / "log", "Server listening on")
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for(log: Path, line: str) -> None:
    deadline = time.monotonic() + STARTED_S
    while line not in (said := log.read_text()):
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
