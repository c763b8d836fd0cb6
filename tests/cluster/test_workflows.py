"""The workflows, none of which has run: what they take from others is fixed by its digest, or is known not to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# Images by a tag: nobody here could ask a registry for their digests (docs/guides/install.md).
BY_TAG = {"quay.io/pypa/manylinux_2_28_x86_64"}


def loose_actions(text: str) -> list[str]:
    """Return what a workflow uses without the 40 digits of a commit and the version that they stand for."""
    return [
        used
        for used in re.findall(r"uses: *(.*)$", text, re.M)
        if not used.startswith("./") and not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", used)
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_named_by_their_commit(path: Path) -> None:
    text = path.read_text()
    assert loose_actions(text) == []
    assert {*re.findall(r"container: *(\S+)", text)} <= BY_TAG
    for installed in re.findall(r"pip (?:install|wheel) .*", text):
        assert "--require-hashes" in installed or ("wheel" in installed and "--no-build-isolation" in installed)


def test_an_action_by_a_tag_is_found() -> None:
    bad = ["a/b@v5", "a/b@release/v1", f"a/b@{'0' * 40}", f"a/b@{'0' * 39}  # v1.0.0"]
    assert loose_actions("".join(f"- uses: {used}\n" for used in bad)) == bad


def test_one_action_has_one_commit() -> None:
    used = {action for path in WORKFLOWS for action in re.findall(r"uses: *(\S+)@(\w+)", path.read_text())}
    assert len({name for name, _ in used}) == len(used)


def test_what_others_get_has_the_kernels_of_every_cpu() -> None:
    """`pip wheel .` builds those of the machine that builds."""
    assert "env: { CPU_KERNELS: all, RELEASED_FROM:" in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    found = [ROOT / "cluster.yaml", *(ROOT / "deploy").rglob("*"), *(ROOT / "docs").rglob("*.md")]
    made = [line for path in found if path.is_file() for line in path.read_text().splitlines() if "pip wheel" in line]
    assert len(made) >= 6
    assert [line for line in made if "CPU_KERNELS=all pip wheel" not in line] == []


def test_images_install_by_hash_alone() -> None:
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    installed = [line for line in dockerfile.splitlines() if "pip install" in line or "pip wheel" in line]
    assert len(installed) == 8
    ours = [line for line in installed if "--require-hashes" not in line]
    assert all("/dist/*.whl" in line or "--no-build-isolation" in line for line in ours)
    assert all("--no-deps" in line for line in installed)


def test_a_release_has_one_version() -> None:
    """`.ci/release` refuses another one, when it is too late to be cheap."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert ".ci/release" in (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
