"""API keys say which caller sends a request, what the caller may ask for, and how much.

A keys file holds hashes, never keys. A key is 256 random bits, so that one round of SHA-256 protects it: slow hashes
are needed for passwords only, because people choose them.

    keys:
      - name: ann                  the owner of files, jobs and limits; it stays when the key is replaced
        hash: sha256:9f86d0...     of the key
        scopes: [generate, batch]  what it may ask for; these two if left out
        requests_per_minute: 60    to generate or tokenise, over all gateways together; no limit if left out
        tokens_per_minute: 90000   of prompts and outputs; no limit if left out
        tokens_per_day: 5000000    likewise, from midnight UTC to the next (budgets.py)
        tokens_per_month: 100000000
        most_open: 32              requests for tokens at once; 256 if left out
        most_logprobs: 200000      of answers open at once: choices x tokens x (1 + top_logprobs); else 1,048,576
        least_ttft_ms: 500         the shortest time to a first token that it may ask for; any if left out
        least_tbt_ms: 50           likewise between two tokens
        least_priority: 0          the lowest number of `priority`, which goes first; any if left out
        weight: 2                  of its part, where keys together want more than there is; 1 if left out
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from alignedserve.config.config import Config
from alignedserve.config.sources import read_yaml
from alignedserve.core import KEY_SALT_SIZE, NO_KEY_SALT
from alignedserve.errors import ConfigError

log = logging.getLogger("alignedserve.keys")

HASHED = "sha256:"
MOST_KEYS = 1000
GONE_LOOKS = 3  # at a keys file, a second apart, after which one that is not there was deleted: editors replace files
MOST_OPEN = 256  # requests for tokens that a key may have open at once, if the entry sets no number
# Log-probabilities that all open answers of a caller may have at one gateway, where its entry sets no number. An answer
# of 8,192 tokens with top_logprobs 20 has 172,032.
MOST_LOGPROBS_AT_ONCE = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_KEY_PREFIX = "as-"


class Scope(str, Enum):
    """A kind of request that a key may make."""

    GENERATE = "generate"  # tokens, and what the models are
    BATCH = "batch"  # files, and jobs over them
    DASHBOARD = "dashboard"  # the live page, which shows the requests and jobs of every key, and all of /status
    ADAPTERS = "adapters"  # loading and unloading adapters, for every key
    METRICS = "metrics"  # figures of all keys together, for Prometheus; dashboard allows them too


EVERY_SCOPE = frozenset(Scope)
USUAL_SCOPES = frozenset({Scope.GENERATE, Scope.BATCH})  # of a key of the file that names none


@dataclass(frozen=True)
class Limits:
    """The limits of what a key may ask for; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    most_open: int | None = None  # requests for tokens at once
    most_logprobs: int | None = None  # of answers open at once
    least_ttft_ms: int | None = None
    least_tbt_ms: int | None = None
    least_priority: int | None = None
    weight: int | None = None

    @property
    def has_budget(self) -> bool:
        return self.tokens_per_day is not None or self.tokens_per_month is not None

    @property
    def logprobs_at_once(self) -> int:
        return MOST_LOGPROBS_AT_ONCE if self.most_logprobs is None else self.most_logprobs


@dataclass(frozen=True)
class Caller:
    """The sender of a request. Files, jobs and limits belong to its id."""

    id: str
    scopes: frozenset[Scope] = EVERY_SCOPE
    salt: str = ""  # callers with the same salt share the KV of prompts that begin alike
    limits: Limits = field(default_factory=Limits)

    @property
    def weight(self) -> int:
        return 1 if self.limits.weight is None else self.limits.weight

    @property
    def priority(self) -> int:
        """Return the priority of a request that names none."""
        return max(0, self.limits.least_priority or 0)

    def salt_with(self, own: str | None) -> str:
        """Return the caller's salt, followed by the salt that the caller itself chose for a request.

        Salts of keys have one length, so that no caller can write another caller's salt."""
        return (self.salt or NO_KEY_SALT) + own if own else self.salt


ANONYMOUS = Caller("anonymous")  # every caller, if there are no keys
SETTING_KEY_ID = "default"  # the id of callers with the key of the setting server.api_key


@dataclass(frozen=True)
class KeyEntry:
    """A key as a keys file holds it."""

    name: str
    hash: str
    scopes: frozenset[Scope] = USUAL_SCOPES
    limits: Limits = field(default_factory=Limits)

    @property
    def caller(self) -> Caller:
        salt = hashlib.sha256(f"salt of {self.hash}".encode()).hexdigest()[:KEY_SALT_SIZE]
        most_open = MOST_OPEN if self.limits.most_open is None else self.limits.most_open
        return Caller(self.name, self.scopes, salt, replace(self.limits, most_open=most_open))


class KeyRing:
    """All keys that this server accepts."""

    def __init__(self, entries: Iterable[KeyEntry], is_closed: bool = False) -> None:
        """A ring without keys lets everybody in, as anonymous, unless it `is_closed`: then nobody."""
        self._is_closed = is_closed
        self._by_hash = {entry.hash: entry.caller for entry in entries}
        self._by_id = {caller.id: caller for caller in self._by_hash.values()}

    def __bool__(self) -> bool:
        return bool(self._by_hash) or self._is_closed

    def take(self, other: KeyRing) -> None:
        """Accept the keys of the other ring from now on, and no others."""
        self._by_hash, self._by_id, self._is_closed = other._by_hash, other._by_id, other._is_closed

    @property
    def digest(self) -> str:
        """Return a digest of the names of the keys: it is the same where the same callers are known."""
        return hashlib.sha256(" ".join(sorted(self._by_id)).encode()).hexdigest()[:16]

    def knows(self, caller: Caller, scopes: Collection[Scope] = ()) -> bool:
        """Return whether the key with which this caller came still counts, and has one of these scopes where any are
        given. The key is known by its salt: a new key under the same name is another key."""
        known = next((known for known in self._by_hash.values() if known.salt == caller.salt), None)
        if known is None:
            return not self
        return not scopes or not known.scopes.isdisjoint(scopes)

    def knows_name(self, caller: str) -> bool:
        return self.limits(caller) is not None

    def limits(self, caller: str, scope: Scope | None = None) -> Limits | None:
        """Return the limits of a caller by its id, which a job keeps; None where its key, or this scope of its key, has
        been revoked."""
        known = self._by_id.get(caller) if self else ANONYMOUS
        return None if known is None or (scope is not None and scope not in known.scopes) else known.limits

    def caller(self, key: str | None) -> Caller | None:
        """Return the caller that has this key, or None; without any keys, every caller is anonymous.

        The key is compared with all hashes, each in constant time, so that the time taken reveals nothing.
        """
        if not self:
            return ANONYMOUS
        if key is None:
            return None
        digest, found = hash_key(key), None
        for known, caller in self._by_hash.items():
            if hmac.compare_digest(digest, known):
                found = caller
        return found


def hash_key(key: str) -> str:
    return HASHED + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def hash_setting(api_key: str) -> str:
    """Return the setting server.api_key as it leaves the launcher: hashed, unless it is a hash already."""
    return api_key if _DIGEST.fullmatch(api_key) else hash_key(api_key)


def key_ring(api_key: str | None, keys_file: str | None, is_gone: bool = False) -> KeyRing:
    """Return the keys of the setting and of the keys file; a file that `is_gone` holds none."""
    entries = [] if api_key is None else [KeyEntry(SETTING_KEY_ID, hash_setting(api_key), EVERY_SCOPE)]
    if keys_file is not None and not is_gone:
        entries += read_keys(Path(keys_file))
    _check_distinct(entries, str(keys_file))
    return KeyRing(entries, is_closed=keys_file is not None)


class KeysFile:
    """The keys of the setting and of the keys file, which is read again where it has changed."""

    def __init__(self, api_key: str | None, path: str | None) -> None:
        self._source, self._num_gone = (api_key, path), 0
        self._read = self._source, state_of(path), False  # when it was read
        self.ring = key_ring(api_key, path)

    def follow(self, config: Config) -> None:
        """Take the keys from the key and the file that these settings name, from the next `read` on."""
        self._source = config.server.api_key, config.server.keys_file

    def read(self) -> KeyRing:
        """Return the keys as they are now, which is always the same ring. Raise a ConfigError, and leave the ring as it
        was, where the file cannot be read or is wrong. The keys of a file that was deleted, and not replaced at once,
        count no more."""
        api_key, path = source = self._source
        self._num_gone = self._num_gone + 1 if path is not None and _is_gone(path) else 0
        now = source, state_of(path), (is_gone := self._num_gone >= GONE_LOOKS)
        if now != self._read:
            self.ring.take(key_ring(api_key, path, is_gone))
            self._read = now
            log.info("the keys have changed: those of now count from now on, and no others")
        return self.ring


def _is_gone(path: str) -> bool:
    """Return whether there is no such file, which a disk that does not answer does not say."""
    try:
        os.stat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def state_of(*paths: str | None) -> tuple[tuple[int, ...], ...]:
    """Return what changes with these files."""
    found: list[tuple[int, ...]] = []
    for path in filter(None, paths):
        try:
            now = os.stat(path)
            found.append((now.st_ino, now.st_size, now.st_mtime_ns))
        except OSError:
            found.append(())
    return tuple(found)


def read_keys(path: Path) -> list[KeyEntry]:
    tree = read_yaml(path)
    keys = tree.get("keys")
    if set(tree) != {"keys"} or not isinstance(keys, list):
        raise ConfigError(f"{path} must hold a list named keys: see `alignedserve key --help`")
    if len(keys) > MOST_KEYS:
        raise ConfigError(f"{path} holds {len(keys)} keys: {MOST_KEYS} is the most")
    entries = [_read_entry(key, f"{path}: keys[{place}]") for place, key in enumerate(keys)]
    _check_distinct(entries, str(path))
    return entries


def _check_distinct(entries: Iterable[KeyEntry], source: str) -> None:
    names: set[str] = set()
    hashes: set[str] = set()
    for entry in entries:
        if entry.name in names or entry.hash in hashes:
            kind = "name" if entry.name in names else "hash"
            raise ConfigError(f"{source}: the {kind} of key {entry.name} is given twice")
        names.add(entry.name)
        hashes.add(entry.hash)


def _read_entry(key: Any, where: str) -> KeyEntry:
    limits = [limit.name for limit in fields(Limits)]
    if not isinstance(key, Mapping):
        raise ConfigError(f"{where} must be an entry with name and hash")
    if unknown := sorted(set(map(str, key)) - {"name", "hash", "scopes", *limits}):
        raise ConfigError(
            f"{where}: a key has no field {unknown[0]}: its fields are name, hash, scopes, {', '.join(limits)}"
        )
    name, digest = key.get("name"), key.get("hash")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name must be at most 64 letters, digits and ._@-")
    if name in (ANONYMOUS.id, SETTING_KEY_ID):
        raise ConfigError(f"{where}: the name {name} is reserved: choose another")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: hash must be {HASHED} and 64 hexadecimal digits, as `alignedserve key` writes it")
    named = {limit: key[limit] for limit in limits if key.get(limit) is not None}
    for limit, number in named.items():
        if type(number) is not int or (number < 1 and limit != "least_priority"):
            least = "" if limit == "least_priority" else ", 1 or more"
            raise ConfigError(f"{where}: {limit} must be a whole number{least}")
    scopes, known = key.get("scopes"), [scope.value for scope in Scope]
    if scopes is None:
        return KeyEntry(name, digest, limits=Limits(**named))
    if not isinstance(scopes, list) or not scopes or not all(scope in known for scope in scopes):
        raise ConfigError(f"{where}: scopes must be a list of {', '.join(known)}")
    return KeyEntry(name, digest, frozenset(map(Scope, scopes)), Limits(**named))


def make_key(path: Path, name: str, scopes: Iterable[Scope], limits: Limits) -> str:
    """Return a new key and add its hash to the file; the key itself is stored nowhere."""
    key, text = _KEY_PREFIX + secrets.token_urlsafe(32), ""
    if path.exists():
        if not path.is_file():  # such as /dev/null, which the new file would replace
            raise ConfigError(f"{path} is not a file")
        if read_yaml(path) != {"keys": []}:  # raises if the file is not valid YAML
            text = path.read_text(encoding="utf-8")
    lines = [text.rstrip() or "keys:", f"  - name: {name}", f"    hash: {hash_key(key)}"]
    lines.append(f"    scopes: [{', '.join(sorted(frozenset(scopes)))}]")
    lines += [f"    {limit}: {number}" for limit, number in asdict(limits).items() if number is not None]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        read_keys(temporary)
        temporary.replace(path)
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(temporary), str(path))) from None
    finally:
        temporary.unlink(missing_ok=True)
    return key
