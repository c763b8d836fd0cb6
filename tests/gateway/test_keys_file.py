"""Tests of keys: they are made, kept as hashes and read again, and a bad key file is refused in one line."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from alignedserve.cli import main as cli
from alignedserve.errors import ConfigError
from alignedserve.gateway.access.keys import (
    ANONYMOUS,
    GONE_LOOKS,
    MOST_OPEN,
    USUAL_SCOPES,
    KeysFile,
    Limits,
    Scope,
    hash_key,
    hash_setting,
    key_ring,
    read_keys,
)

DIGEST = hash_key("key")


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["key", *arguments]) == 0
    return capsys.readouterr().out.strip()


def test_a_made_key_opens_and_is_not_in_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    ann = made(capsys, "ann", "--file", str(path))
    limited = ("--scope", "batch", "--requests-per-minute", "7", "--tokens-per-minute", "9", "--most-open", "2")
    bob = made(capsys, "bob", "--file", str(path), *limited)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ann not in path.read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["keys.yaml"]
    ring = key_ring(None, str(path))
    first, second = ring.caller(ann), ring.caller(bob)
    assert first is not None
    assert second is not None
    assert (first.id, first.scopes, first.limits) == ("ann", USUAL_SCOPES, Limits(most_open=MOST_OPEN))
    assert (second.id, second.scopes, second.limits) == ("bob", frozenset({Scope.BATCH}), Limits(7, 9, most_open=2))
    assert first.salt != second.salt
    assert ring.caller(ann + "x") is ring.caller("") is ring.caller(None) is None


def test_a_file_that_has_changed_counts_from_then_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    ann, bob = (made(capsys, name, "--file", str(path)) for name in ("ann", "bob"))
    file = KeysFile(hash_key("of the setting"), str(path))
    ring = file.read()
    path.write_text(path.read_text().partition("  - name: bob")[0])
    assert file.read() is ring
    assert (ring.caller(ann) is not None, ring.caller(bob), ring.limits("bob")) == (True, None, None)
    assert ring.caller("of the setting") is not None
    cat = made(capsys, "cat", "--file", str(path))
    assert ring.caller(cat) is None
    assert file.read().caller(cat) is not None


def test_the_keys_of_a_file_that_was_deleted_end_and_those_of_one_that_is_replaced_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.yaml"
    ann = made(capsys, "ann", "--file", str(path))
    whole, file = path.read_text(), KeysFile(hash_key("of the setting"), str(path))
    for num_looks in (GONE_LOOKS - 1, GONE_LOOKS):
        path.unlink()
        for _ in range(GONE_LOOKS - 1):
            with pytest.raises(ConfigError):
                file.read()
        assert file.ring.caller(ann) is not None
        if num_looks == GONE_LOOKS:
            file.read()
            assert (file.ring.caller(ann), file.ring.caller(None)) == (None, None)
            assert file.ring.caller("of the setting") is not None
        path.write_text(whole)
        assert file.read().caller(ann) is not None


@pytest.mark.parametrize("text", ["keys: {}", "no yaml: [", None])
def test_a_file_that_cannot_be_read_again_leaves_the_keys_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    path = tmp_path / "keys.yaml"
    ann = made(capsys, "ann", "--file", str(path))
    whole, file = path.read_text(), KeysFile(None, str(path))
    path.unlink() if text is None else path.write_text(text)
    for _ in range(2):
        with pytest.raises(ConfigError):
            file.read()
        assert file.ring.caller(ann) is not None
    path.write_text(whole)
    assert file.read().caller(ann) is not None


def test_bounds_of_urgency_are_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    bounds = ("--least-ttft-ms", "500", "--least-tbt-ms", "50", "--least-priority", "-3")
    ann = made(capsys, "ann", "--file", str(path), *bounds)
    found = key_ring(None, str(path)).caller(ann)
    assert found is not None
    assert (found.limits.least_ttft_ms, found.limits.least_tbt_ms, found.limits.least_priority) == (500, 50, -3)


def test_a_weight_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    ann, bob = made(capsys, "ann", "--file", str(path), "--weight", "3"), made(capsys, "bob", "--file", str(path))
    found = [key_ring(None, str(path)).caller(key) for key in (ann, bob)]
    assert [caller.weight for caller in found if caller is not None] == [3, 1]


def test_what_people_wrote_in_the_file_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"# ours\nkeys:\n  - {{name: old, hash: '{DIGEST}'}}\n")
    new = made(capsys, "new", "--file", str(path))
    assert path.read_text().startswith("# ours\n")
    ring = key_ring("of the setting", str(path))
    assert [getattr(ring.caller(key), "id", None) for key in ("key", new, "of the setting")] == [
        "old",
        "new",
        "default",
    ]


def test_a_file_that_is_empty_gets_its_first_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    path.touch()
    assert key_ring(None, str(path if made(capsys, "ann", "--file", str(path)) else None))


def test_a_file_that_is_no_text_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(b"\xd0")
    assert cli.main(["key", "ann", "--file", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"alignedserve: {path} is not valid YAML: ")
    assert path.read_bytes() == b"\xd0"


def test_a_name_is_given_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    made(capsys, "ann", "--file", str(path))
    before = path.read_text()
    assert cli.main(["key", "ann", "--file", str(path)]) == 2
    assert f"{path}: the name of key ann is given twice" in capsys.readouterr().err
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["keys.yaml"]


def test_without_keys_everybody_is_anonymous() -> None:
    ring = key_ring(None, None)
    assert ring.caller(None) is ring.caller("any") is ANONYMOUS
    assert not ring


def test_a_hash_may_stand_for_the_key_of_the_setting() -> None:
    assert hash_setting(DIGEST) == hash_setting("key") == DIGEST
    assert key_ring(DIGEST, None).caller("key") == key_ring("key", None).caller("key")
    assert key_ring(DIGEST, None).caller(DIGEST) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must hold a list named keys"),
        ("keys: {}", "must hold a list named keys"),
        (f"keys: [{{name: a, hash: '{DIGEST}'}}]\nmore: 1", "must hold a list named keys"),
        ("keys: [5]", "keys[0] must be an entry"),
        (f"keys: [{'5, ' * 1001}]", "holds 1001 keys: 1000 is the most"),
        (f"keys: [{{hash: '{DIGEST}'}}]", "keys[0]: name must be"),
        (f"keys: [{{name: 'a b', hash: '{DIGEST}'}}]", "keys[0]: name must be"),
        (f"keys: [{{name: default, hash: '{DIGEST}'}}]", "the name default is reserved"),
        ("keys: [{name: a, hash: key}]", "keys[0]: hash must be sha256:"),
        (f"keys: [{{name: a, hash: '{DIGEST}', key: b}}]", "keys[0]: a key has no field key"),
        (f"keys: [{{name: a, hash: '{DIGEST}', scopes: [all]}}]", "keys[0]: scopes must be a list of generate, batch"),
        (f"keys: [{{name: a, hash: '{DIGEST}', scopes: []}}]", "keys[0]: scopes must be"),
        (f"keys: [{{name: a, hash: '{DIGEST}', most_open: 0}}]", "keys[0]: most_open must be a whole number"),
        (f"keys: [{{name: a, hash: '{DIGEST}', most_open: true}}]", "keys[0]: most_open must be a whole number"),
        (f"keys: [{{name: a, hash: '{DIGEST}'}}, {{name: b, hash: '{DIGEST}'}}]", "the hash of key b is given twice"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_keys(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
