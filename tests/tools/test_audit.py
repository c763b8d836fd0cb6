"""Every lock is audited, what could not be asked is no answer, and a release's list of software has every package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import audit
import sbom
from tests.tools.test_locks import LOCKS, entries

KNOWS = "torch==2.13.0"  # what the auditor below has heard of


def auditor(folder: Path, body: str) -> str:
    """Write a program in the place of pip-audit, which has the lock's text as `lock`; return its path."""
    path = folder / "pip-audit"
    opened = "import pathlib, sys\nlock = pathlib.Path(sys.argv[-1]).read_text()\n"
    path.write_text(f"#!{sys.executable}\n{opened}{body}\n")
    path.chmod(0o755)
    return str(path)


def test_every_lock_is_asked_about_and_strictly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(auditor(tmp_path, "sys.exit('--strict' not in sys.argv)")) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^(\S+): no known vulnerability$", said, re.M) == sorted(p.name for p in LOCKS.iterdir())


def test_a_vulnerability_fails_whichever_build_of_torch_is_locked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = "print('torch 2.13.0 X-1'); sys.exit('Found 1 known vulnerability in 1 package')"
    assert audit.main(auditor(tmp_path, f"if '{KNOWS} ' in lock: {found}")) == 1
    said = capsys.readouterr().out
    assert "torch-cpu.txt: torch 2.13.0 X-1" in said
    assert "torch-cuda.txt: torch 2.13.0 X-1" in said
    assert "serve.txt: no known vulnerability" in said


def test_what_could_not_be_asked_is_one_line_and_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(auditor(tmp_path, "sys.exit('first\\nno route to host')")) == 2
    said = capsys.readouterr()
    assert said.err == "no audit of audit.txt, is the package index reached? no route to host\n"
    assert said.out == ""


def test_a_release_lists_all_that_it_is_served_with(tmp_path: Path) -> None:
    made = sbom.bill(LOCKS)
    assert (made["bomFormat"], made["specVersion"], made["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", made["serialNumber"])
    names = {each["name"] for each in made["components"]}
    assert {"torch", "nvidia-cublas", "triton", "tokenspeed-fa3", "ray", "redis", "fastapi"} <= names
    for name in sbom.SERVED:
        text = (LOCKS / name).read_text()
        listed = [each for each in made["components"] if each["properties"][0]["value"] == name]
        assert len(listed) == len(entries(name)), name
        assert sum(len(each["hashes"]) for each in listed) == text.count("--hash=sha256:")
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@[\w.%]+", each["purl"]) for each in made["components"])
    assert all(len(digest["content"]) == 64 for each in made["components"] for digest in each["hashes"])
    references = [each["bom-ref"] for each in made["components"]]
    assert len({*references}) == len(references)
    written = subprocess.run([sys.executable, sbom.__file__, tmp_path / "a" / "sbom.json"], check=False)
    assert written.returncode == 0
    assert sbom.bill(LOCKS) == made, "the same locks give the same list"
