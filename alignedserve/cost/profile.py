"""A profile: steps of one model that were measured on one device, the cost model that they give, and its file.

The cache of profiles is never trusted blindly. A file that is broken, or of another subject than its name says, counts
as absent. A worker begins with a whole one, learns from its steps, and leaves what it has learned to the next start.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from alignedserve.architectures.gguf.places import PLACES
from alignedserve.core import FREE_COPIES, AttentionPattern, CopyCost, Fold, WorkerLimits
from alignedserve.cost.fit import BUSY, OnlineCost, Point, fit
from alignedserve.cost.model import Coefficients, CostModel, Kind, Link, Route, Shape, Uncertainty
from alignedserve.errors import ProfileError, file_errors
from alignedserve.machine.whole_file import whole_file

log = logging.getLogger("alignedserve.cost")

_FORMAT = 4
_RENAMED = {"remade": "hidden"}  # a coefficient: its name here, and in the file
_MOST_SLOWDOWN = 4.0  # that a worker starts with: where everything starts at once, the first seconds say little


@dataclass(frozen=True)
class Subject:
    """The model, device and software that were measured: a profile is valid for this subject only."""

    model: str  # fingerprint of the model folder
    device: str
    dtype: str
    tensor_parallel: int
    version: str  # of AlignedServe
    kernels: str  # their name, a digest of their sources, which steps are captured, and over what ranks talk

    @property
    def is_processor(self) -> bool:
        """Return whether the device is a CPU, whose name ends with the number of its threads."""
        return self.device.endswith((" thread", " threads"))

    @property
    def file_name(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@dataclass(frozen=True)
class MeasuredMemory:
    """The memory of the worker that was measured, enough to simulate the worker."""

    limits: WorkerLimits
    kv_bytes: int  # of a token, over all layers


@dataclass(frozen=True)
class Profile:
    subject: Subject
    memory: MeasuredMemory
    points: tuple[Point, ...]
    model: CostModel
    remade_token_s: float = 0.0  # measured apart from the steps
    links: Mapping[Route, Link] = field(default_factory=dict)  # of copies between the device and the arena
    slowdown: float = 1.0  # the usual step's time over that of the quickest ones, which are the points
    measured_at: float = 0.0  # seconds since 1970

    @classmethod
    def fitted(
        cls,
        subject: Subject,
        memory: MeasuredMemory,
        points: tuple[Point, ...],
        remade_token_s: float = 0.0,
        links: Mapping[Route, Link] = MappingProxyType({}),
        slowdown: float = 1.0,
        measured_at: float = 0.0,
    ) -> Profile:
        model = fit(points, remade_token_s)
        return cls(subject, memory, points, model, remade_token_s, links, slowdown, measured_at)

    def covers(self, limits: WorkerLimits) -> bool:
        """Return whether steps were measured up to the largest that these limits allow."""
        own = self.memory.limits
        return own.max_step_tokens >= limits.max_step_tokens and own.max_batch >= limits.max_batch

    def joined(self, other: Profile) -> Profile:
        """Return this profile with the steps of another of this subject, up to the larger limits of both."""
        points = {point.shape: point for point in (*other.points, *self.points)}
        (own, theirs), among = (self.memory.limits, other.memory.limits), ("max_step_tokens", "max_batch")
        limits = replace(own, **{name: max(getattr(own, name), getattr(theirs, name)) for name in among})
        memory, rest = replace(self.memory, limits=limits), (self.remade_token_s, self.links)
        return Profile.fitted(self.subject, memory, (*points.values(),), *rest, self.slowdown, self.measured_at)

    def refined(self, cost: OnlineCost) -> Profile:
        """Return this profile with what `cost`, which began with it, has learned."""
        points, slowdown = tuple(cost.refined(self.points)), max(1.0, cost.slowdown)
        return replace(self, points=points, model=cost.quiet, slowdown=slowdown)

    @property
    def is_busy(self) -> bool:
        """Return whether other work shared the machine with the steps that were measured."""
        return self.slowdown >= BUSY

    @property
    def quietness(self) -> str:
        """Return when the profile was measured, and how quiet the machine was."""
        state = "busy" if self.is_busy else "quiet"
        when = datetime.fromtimestamp(self.measured_at, timezone.utc)
        return f"measured at {when:%Y-%m-%d %H:%M} UTC on a {state} machine (slowdown {self.slowdown:.2f})"

    @property
    def copying(self) -> CopyCost:
        """Return the time to copy KV from the arena to the device."""
        link = self.links.get(Route.ARENA_TO_DEVICE)
        return link.copying(self.memory.kv_bytes) if link is not None else FREE_COPIES

    def online(self) -> OnlineCost:
        """Return a cost model that goes on learning from this profile.

        Until then the machine is taken to be as busy as it was.
        """
        slowdown, known = min(_MOST_SLOWDOWN, self.slowdown), self.model.uncertainty
        return OnlineCost(self.points, self.remade_token_s, slowdown, known)


def fingerprint(folder: Path) -> str:
    """Return a digest of a model folder: its configuration, and the names and sizes of its weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    if (folder / PLACES).is_file():  # the table of a GGUF file's tensors
        digest.update((folder / PLACES).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:24]


def cached(directory: Path, subject: Subject) -> Profile | None:
    path = directory / subject.file_name
    try:
        if not path.exists():
            return None
        profile = load(path)
    except OSError:  # `store` logs that there is no cache
        return None
    except ProfileError as error:
        log.warning("%s: it is measured again", error)
        return None
    if profile.subject != subject:
        log.warning("%s is of another model, device, version or kernels than its name says: it is measured again", path)
        return None
    return profile


def known_profile(directory: Path, subject: Subject, limits: WorkerLimits) -> Profile | None:
    """Return the cached profile, if it has steps as large as these limits allow."""
    profile = cached(directory, subject)
    if profile is None or not profile.covers(limits):
        return None
    log.info("cost profile of %s taken from the cache: %s", subject.device, profile.quietness)
    return profile


def store(directory: Path, profile: Profile) -> None:
    """Write the profile to the cache. A cache that cannot be written only costs time at the next start."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save(profile, directory / profile.subject.file_name)
    except (OSError, ProfileError) as error:
        log.warning("the cost profile cannot be saved for the next start: %s", error)


def keep(directory: Path, profile: Profile) -> None:
    """Write the profile to the cache, joined with one of larger steps that is there: workers of one model may have
    other limits."""
    known = cached(directory, profile.subject)
    store(directory, profile if known is None or profile.covers(known.memory.limits) else profile.joined(known))


def save(profile: Profile, path: Path) -> None:
    """Write the file whole or not at all: other workers may read and write it at the same time."""
    with file_errors(ProfileError, path), whole_file(path) as file:
        file.write(json.dumps(_tree(profile), indent=1).encode())


def load(path: Path) -> Profile:
    try:
        with file_errors(ProfileError, path, "read"):
            tree = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is not JSON: {error}") from None
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        raise ProfileError(f"{path} is not a cost profile of format {_FORMAT}: write one with `alignedserve profile`")
    try:
        return _profile(tree)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"{path} is a broken cost profile ({type(error).__name__}: {error})") from None


def _tree(profile: Profile) -> dict[str, Any]:
    model = profile.model
    return {
        "format": _FORMAT,
        "subject": asdict(profile.subject),
        "memory": asdict(profile.memory),
        "coefficients": {
            kind.value: {_RENAMED.get(name, name): value for name, value in asdict(values).items()}
            for kind, values in model.coefficients.items()
        },
        "uncertainty": {
            kind.value: {"median": errors.median, "p90": errors.p90} for kind, errors in model.uncertainty.items()
        },
        "hidden_token_s": profile.remade_token_s,
        "slowdown": profile.slowdown,
        "measured_at": profile.measured_at,
        "links": {route.value: asdict(link) for route, link in profile.links.items()},
        "point_fields": [*Shape._fields, "seconds"],
        "points": [[*point.shape, point.seconds] for point in profile.points],
    }


def _profile(tree: Mapping[str, Any]) -> Profile:
    coefficients = {kind: _coefficients(tree["coefficients"][kind.value]) for kind in Kind}
    errors = {kind: _numbers(tree["uncertainty"][kind.value]) for kind in Kind}
    uncertainty = {kind: Uncertainty(of["median"], of["p90"]) for kind, of in errors.items()}
    links = {Route(name): Link(**_numbers(values)) for name, values in tree["links"].items()}
    return Profile(
        subject=Subject(**tree["subject"]),
        memory=_memory(tree["memory"]),
        points=tuple(_point(row) for row in tree["points"]),
        model=CostModel(coefficients, uncertainty),
        remade_token_s=_number(tree["hidden_token_s"]),
        links=links,
        slowdown=_number(tree["slowdown"]),
        measured_at=_number(tree["measured_at"]),
    )


def _memory(tree: Mapping[str, Any]) -> MeasuredMemory:
    limits = {name: value for name, value in tree["limits"].items() if value is not None}
    fold = _fold(limits.pop("fold")) if "fold" in limits else None
    return MeasuredMemory(WorkerLimits(**_counts(limits), fold=fold), int(_number(tree["kv_bytes"])))


def _fold(tree: Mapping[str, Any]) -> Fold:
    sight = {name: size for name, size in tree["sight"].items() if size is not None}
    return Fold(AttentionPattern(**_counts(sight)), int(_number(tree["blocks"])))


def _counts(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: int(_number(value)) for name, value in tree.items()}


def _coefficients(tree: Mapping[str, Any]) -> Coefficients:
    token = tuple(map(_number, tree["token"]))
    if not token:
        raise ValueError("no coefficient for tokens")
    names = {told: name for name, told in _RENAMED.items()}
    rest = {names.get(name, name): value for name, value in tree.items() if name != "token"}
    return Coefficients(token=token, **_numbers(rest))


def _point(row: list[Any]) -> Point:
    *shape, seconds = row
    if len(shape) != len(Shape._fields) or not all(type(count) is int and count >= 0 for count in shape):
        raise ValueError(f"a point with the invalid shape {shape!r:.80}")
    if not _number(seconds):
        raise ValueError("a point without a duration")
    return Point(Shape(*shape), float(seconds))


def _numbers(tree: Mapping[str, Any]) -> dict[str, float]:
    return {name: _number(value) for name, value in tree.items()}


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not isfinite(value) or value < 0:
        raise ValueError(f"{value!r:.40} where a number of 0 or more must be")
    return float(value)
