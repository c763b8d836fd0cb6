"""API keys: who calls, what they may ask for, how much of it.

A keys file holds hashes, never keys. A key is 256 random bits, so that one round of SHA-256 keeps it: what makes slow
hashes needed is that people choose passwords.

    keys:
      - name: ann                  whose files, jobs and limits they are; stays when the key is replaced
        hash: sha256:9f86d0...     of the key
        scopes: [generate, batch]  what it may ask for; both where it is not said
        requests_per_minute: 60    of its own, over all gateways; no limit where it is not said
        tokens_per_minute: 90000   of prompts and outputs
        most_open: 32              requests for tokens at once; 256 where it is not said
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from alignedserve.config.sources import read_yaml
from alignedserve.errors import ConfigError

HASHED = "sha256:"
MOST_KEYS = 1000
MOST_OPEN = 256  # requests for tokens that a key has open at once, where its entry names no number
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_KEY_PREFIX = "as-"


class Scope(str, Enum):
    """What a key may ask for."""

    GENERATE = "generate"  # tokens, and what the models are
    BATCH = "batch"  # files, and jobs over them


EVERY_SCOPE = frozenset(Scope)


@dataclass(frozen=True)
class Limits:
    """None: as much as the server can."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs
    most_open: int | None = None  # requests for tokens at once


@dataclass(frozen=True)
class Caller:
    """Who calls. What belongs to somebody belongs to an id."""

    id: str
    scopes: frozenset[Scope] = EVERY_SCOPE
    salt: str = ""  # KV of prompts that begin alike is shared among callers of the same one
    limits: Limits = field(default_factory=Limits)

    def with_most_open(self, most_open: int) -> Caller:
        """Where its entry names no number."""
        if self.limits.most_open is not None:
            return self
        return replace(self, limits=replace(self.limits, most_open=most_open))

    def salted(self, own: str | None) -> str:
        """With what the caller itself keeps apart. A key's salt has one length: no other's can be spelled with it."""
        return self.salt + (own or "")


ANONYMOUS = Caller("anonymous")  # everybody, where there are no keys
OF_SETTING = "default"  # the id of whoever has the key of the setting server.api_key


@dataclass(frozen=True)
class Entry:
    """A key as a file holds it."""

    name: str
    hash: str
    scopes: frozenset[Scope] = EVERY_SCOPE
    limits: Limits = field(default_factory=Limits)

    @property
    def caller(self) -> Caller:
        salt = hashlib.sha256(f"salt of {self.hash}".encode()).hexdigest()[:32]
        return Caller(self.name, self.scopes, salt, self.limits)


class KeyRing:
    """Every key that opens this server."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._by_hash = {entry.hash: entry.caller.with_most_open(MOST_OPEN) for entry in entries}

    def __bool__(self) -> bool:
        return bool(self._by_hash)

    def caller(self, key: str | None) -> Caller | None:
        """Whose key it is; without keys, everybody is anonymous.

        All hashes are compared, each in constant time: how long it takes tells nothing of which one is alike.
        """
        if not self._by_hash:
            return ANONYMOUS
        if key is None:
            return None
        given, found = hashed(key), None
        for known, caller in self._by_hash.items():
            if hmac.compare_digest(given, known):
                found = caller
        return found


def hashed(key: str) -> str:
    return HASHED + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def sealed(key: str) -> str:
    """The setting server.api_key as it leaves the launcher: hashed, where it is not already."""
    return key if _DIGEST.fullmatch(key) else hashed(key)


def key_ring(api_key: str | None, keys_file: str | None) -> KeyRing:
    """Of the setting's key and the file's."""
    entries = [] if api_key is None else [Entry(OF_SETTING, sealed(api_key))]
    if keys_file is not None:
        entries += read_keys(Path(keys_file))
    _check_apart(entries, str(keys_file))
    return KeyRing(entries)


def read_keys(path: Path) -> list[Entry]:
    tree = read_yaml(path)
    listed = tree.get("keys")
    if set(tree) != {"keys"} or not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path} must hold a list named keys, with one key at least: see `alignedserve key --help`")
    if len(listed) > MOST_KEYS:
        raise ConfigError(f"{path} holds {len(listed)} keys: {MOST_KEYS} is the most")
    entries = [_entry(one, f"{path}: keys[{place}]") for place, one in enumerate(listed)]
    _check_apart(entries, str(path))
    return entries


def _check_apart(entries: Iterable[Entry], source: str) -> None:
    names: set[str] = set()
    hashes: set[str] = set()
    for entry in entries:
        if entry.name in names or entry.hash in hashes:
            what = "name" if entry.name in names else "hash"
            raise ConfigError(f"{source}: the {what} of key {entry.name} is there twice")
        names.add(entry.name)
        hashes.add(entry.hash)


def _entry(given: Any, where: str) -> Entry:
    limits = [one.name for one in fields(Limits)]
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be an entry with name and hash")
    if unknown := sorted(set(map(str, given)) - {"name", "hash", "scopes", *limits}):
        raise ConfigError(f"{where}: {unknown[0]} is no field of a key: it has name, hash, scopes, {', '.join(limits)}")
    name, digest = given.get("name"), given.get("hash")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name must be at most 64 letters, digits and ._@-")
    if name in (ANONYMOUS.id, OF_SETTING):
        raise ConfigError(f"{where}: the name {name} is taken: choose another")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: hash must be {HASHED} and 64 hexadecimal digits, as `alignedserve key` writes it")
    named = {limit: _limit(given[limit], f"{where}: {limit}") for limit in limits if given.get(limit) is not None}
    return Entry(name, digest, _scopes(given.get("scopes"), where), Limits(**named))


def _limit(given: Any, where: str) -> int:
    if type(given) is not int or given < 1:
        raise ConfigError(f"{where} must be a whole number, 1 or more")
    return given


def _scopes(given: Any, where: str) -> frozenset[Scope]:
    if given is None:
        return EVERY_SCOPE
    known = [one.value for one in Scope]
    if not isinstance(given, list) or not given or not all(one in known for one in given):
        raise ConfigError(f"{where}: scopes must be a list of {', '.join(known)}")
    return frozenset(map(Scope, given))


def make_key(path: Path, name: str, scopes: Iterable[Scope], limits: Limits) -> str:
    """A new key, whose hash is added to the file; the key itself is nowhere but in the answer."""
    key, text = _KEY_PREFIX + secrets.token_urlsafe(32), ""
    if path.exists():
        if not path.is_file():  # such as /dev/null, which a file would take the place of
            raise ConfigError(f"{path} is no file")
        read_yaml(path)  # says what is wrong with it
        text = path.read_text(encoding="utf-8")
    written = f"{text.rstrip() or 'keys:'}\n{_lines(Entry(name, hashed(key), frozenset(scopes), limits))}"
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(written)
        read_keys(beside)
        beside.replace(path)
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(beside), str(path))) from None
    finally:
        beside.unlink(missing_ok=True)
    return key


def _lines(entry: Entry) -> str:
    limits = {one.name: getattr(entry.limits, one.name) for one in fields(Limits)}
    scopes = ", ".join(sorted(entry.scopes))
    rows = [f"  - name: {entry.name}", f"    hash: {entry.hash}", f"    scopes: [{scopes}]"]
    rows += [f"    {name}: {limit}" for name, limit in limits.items() if limit is not None]
    return "\n".join(rows) + "\n"
