"""Tests of `alignedserve store`: it lists what is kept, and finds what is missing."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from alignedserve.cli import main as cli
from alignedserve.config.sections import JobsConfig
from alignedserve.store.job import Endpoint, Job
from alignedserve.store.storage import open_storage
from alignedserve.store.store import Holder, Purpose, StoredFile


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Return a folder with two files and a job that reads one of them."""

    async def fill() -> None:
        storage = await open_storage(JobsConfig(directory=str(tmp_path)), Holder("me", 1))
        for id in ("file-1", "file-2"):
            writing = storage.blobs.begin(id)
            writing.write(b"12345")
            writing.commit()
            await storage.store.add_file(StoredFile(id, "ann", "x", 5, Purpose.BATCH, 1))
        await storage.store.add_job(Job("batch_1", "ann", "file-1", Endpoint.CHAT, "1h", 1, 3_601))
        await storage.close()

    asyncio.run(fill())
    return str(tmp_path)


def test_a_sound_store(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store", "check", "--jobs-directory", data]) == 0
    said = capsys.readouterr().out
    assert "SQLite" in said
    assert "survives a kill" in said
    assert "2 files, 1 batches (1 validating), 0 results" in said


def test_what_is_missing_is_told(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(data) / "files" / "file-1").unlink()
    (Path(data) / "files" / "file-2").write_bytes(b"1")
    (Path(data) / "files" / "file-3").write_bytes(b"1")
    assert cli.main(["store", "check", "--jobs-directory", data]) == 1
    said = capsys.readouterr().out
    assert "problem: the bytes of file-1 are missing" in said
    assert "problem: file-2 has 1 bytes, not 5" in said
    assert "note: file-3 belongs to no file" in said


def test_an_export_has_every_record(data: str, tmp_path: Path) -> None:
    out = tmp_path / "export.jsonl"
    assert cli.main(["store", "export", str(out), "--jobs-directory", data]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["kind"], record["id"]) for record in records] == [
        ("file", "file-1"),
        ("file", "file-2"),
        ("job", "batch_1"),
    ]


def test_a_damaged_store_is_told(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    with (Path(data) / "jobs.sqlite").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\xff" * 4096)
    assert cli.main(["store", "check", "--jobs-directory", data]) != 0
    said = capsys.readouterr()
    assert "is damaged" in said.out + said.err


def test_a_slip_in_the_name_makes_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store", "check", "--jobs-directory", str(tmp_path / "no")]) == 2
    assert "there is no store at" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_without_a_store_there_is_nothing_to_look_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store", "check", "--jobs-store", "off"]) == 2
    assert "jobs.store is off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("store", "shown"),
    [
        ("redis://user:s3cret@host/1", "store: redis://(hidden)@host/1\n"),
        ("rediss+sentinel://:s3cret@a,b/jobs?sentinel_password=s3cret", "jobs?sentinel_password=(hidden)\n"),
        ("redis+sentinels://:s3cret@a", "that begins with redis://, not 'redis+sentinels'\n"),
    ],
)
def test_a_password_of_a_store_is_not_shown(store: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["serve", "--print-config", "--jobs-store", store])
    said = "".join(capsys.readouterr())
    assert shown in said
    assert "s3cret" not in said


def test_without_a_folder_the_only_store_is_meant(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    stores = tmp_path / "home" / "alignedserve" / "jobs"
    assert cli.main(["store", "check"]) == 2
    assert f"there is no store at {stores}" in capsys.readouterr().err
    shutil.copytree(data, stores / "demo-8000", ignore=shutil.ignore_patterns("home"))
    assert cli.main(["store", "check"]) == 0
    shutil.copytree(stores / "demo-8000", stores / "other-8000")
    assert cli.main(["store", "check"]) == 2
    said = capsys.readouterr().err
    assert f"name one of {stores / 'demo-8000'}, {stores / 'other-8000'} with --jobs-directory" in said
