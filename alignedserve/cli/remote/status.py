"""`alignedserve status`: shows a deployment's parts, their nodes and the open requests, as its gateway reports them."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from alignedserve.cli.remote.options import ExplainOptions, StatusOptions
from alignedserve.core import ServiceClass, Slo
from alignedserve.errors import AlignedServeError
from alignedserve.http_client import RemoteServer, said_by, server_at

_LOOK_S = 0.5  # between two questions whether the deployment is ready
_SILENCE_S = 5.0
_FINISH = "finished_reason"
_NEW = "gateway"  # where requests are that the router has not counted yet: it counts each second
_WHERE = {
    _NEW: "with a gateway",
    "unplaced": "without a worker",
    "prefill": "with prefill workers",
    "pool": "in the pool",
    "decode": "with decode workers",
}


_MISSED = {
    "refused": "refused",
    "error": "failed",
    "ttft": "late first token",
    "tbt": "late gaps",
    "stall": "a stall",
    "jct": "late",
}
# What only the scope `dashboard` is told.
_UNTOLD: dict[str, Any] = {"parts": [], "late": [], "scale": {}, "fallbacks": [], "weights": {}}


@dataclass(frozen=True)
class DeploymentStatus:
    state: str
    models: list[str]
    promise: dict[str, Any] | None  # to chats that ask for nothing: ttft_ms, tbt_ms, by machine or operator
    parts: list[dict[str, str]]  # name, role, node, address
    open: dict[str, int]  # class -> requests, the sum of its stages where the router has told them
    served: dict[str, int]  # class -> requests
    failed: dict[str, int]  # class -> of the served
    refused: dict[str, int]  # class -> requests
    ttft_s: dict[str, dict[str, float]]  # class -> share of requests -> within how long their first token came
    attained: dict[str, int]  # class -> requests that got all that was promised to them
    missed: dict[str, dict[str, int]]  # class -> the first promise missed -> requests
    stages: dict[str, dict[str, int]]  # class -> where -> open requests
    pool_pages: dict[str, int]  # state -> pages
    late: list[dict[str, Any]]  # part whose present step is late, and for how long it has run
    scale: dict[str, str]  # role -> least and most workers, where they come and go with the load
    fallbacks: list[dict[str, str]]  # part, what does not work there, why, and what is done instead
    weights: dict[str, str]  # part -> how it keeps the weights of its model, and what that costs
    lacks: str = ""  # what is not told, and why

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    def lines(self) -> list[str]:
        by_node: dict[str, list[str]] = defaultdict(list)
        for part in self.parts:
            by_node[part["node"]].append(part["name"])
        there = Counter(part["role"] for part in self.parts)
        by_load = [f"{there[role]} {role} (of {between})" for role, between in self.scale.items()]
        return [
            f"{self.state}: {', '.join(self.models)}",
            *([self._promised(self.promise)] if self.promise else []),
            *(f"node {node}: {', '.join(sorted(names))}" for node, names in sorted(by_node.items())),
            *([self.lacks] if self.lacks else []),
            *("{part}: its step has run for {step_s:.1f} s".format(**late) for late in self.late),
            *([f"workers by load: {', '.join(by_load)}"] if self.scale else []),
            *(self._of_class(kind) for kind in sorted(self.open)),
            *([f"pool: {_listed(self.pool_pages)} pages"] if self.pool_pages else []),
            *(f"{part}: weights as {kept}" for part, kept in sorted(self.weights.items())),
            *("{part}: {what}: {instead} ({why})".format(**fallback) for fallback in self.fallbacks),
        ]

    @staticmethod
    def _promised(promise: dict[str, Any]) -> str:
        by = "what this machine keeps" if promise["by"] == "machine" else "as its operator says"
        return f"promise: {Slo(promise['ttft_ms'] / 1e3, promise['tbt_ms'] / 1e3).in_words} ({by})"

    def _of_class(self, kind: str) -> str:
        kept, missed = self.attained.get(kind, 0), Counter(self.missed.get(kind))
        asked = kept + missed.total()
        told = [(number, name) for name, number in missed.most_common() if number]
        why = "".join(f", {100 * number / asked:.1f} % {_MISSED[name]}" for number, name in told)
        share = f"; {100 * kept / asked:.1f} % as promised of {asked:,}{why}" if asked else ""
        first = ", ".join(f"{within:g} s for {name}" for name, within in self.ttft_s.get(kind, {}).items())
        first = f"; first token within {first}" if first and kind == ServiceClass.RT.value else ""
        failed, refused = self.failed.get(kind, 0), self.refused.get(kind, 0)
        where = {_WHERE[stage]: count for stage, count in self.stages.get(kind, {}).items() if count}
        waits = f" ({_listed(where)})" if where else ""
        served = f"{self.served.get(kind, 0)} served{f' ({failed:,} failed)' if failed else ''}"
        more = f", {refused:,} refused" if refused else ""
        return f"{kind}: {self.open[kind]} open{waits}, {served}{more}{first}{share}"


class DeploymentServer(RemoteServer):
    """All routes of a deployment."""

    def __init__(self, options: StatusOptions | ExplainOptions) -> None:
        super().__init__(server_at(options.url), options.api_key, silence_s=_SILENCE_S, ca=options.ca)

    def lost(self, error: Exception) -> AlignedServeError:
        if isinstance(error, httpx.InvalidURL):
            return AlignedServeError(f"--url {self.url!r} is not a URL: {error}")
        return AlignedServeError(f"nothing answers at {self.url} (--url names another): {error}")

    def refused(self, answer: httpx.Response) -> AlignedServeError:
        key = " (--api-key)" if answer.status_code == httpx.codes.UNAUTHORIZED else ""
        asked = f"{self.url} answers {answer.status_code} to {answer.url.path}"
        return AlignedServeError(f"{asked}: {said_by(answer)}{key}")

    @property
    def is_ready(self) -> bool:
        with suppress(AlignedServeError):
            return self.ask("GET", "/ready").is_success
        return False


def run(options: StatusOptions) -> int:
    deadline = time.monotonic() + options.wait
    with DeploymentServer(options) as server:
        while not server.is_ready and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        status = _told(server)
    print(json.dumps(asdict(status)) if options.json else "\n".join(status.lines()))
    return 0 if status.is_ready else 1


def _told(server: DeploymentServer) -> DeploymentStatus:
    told, figures = server.tree("GET", "/status"), server.ask("GET", "/metrics")
    exposed = figures.text if figures.is_success else ""
    sums, stages = _sums(exposed), _by_class(exposed, "num_requests_at", "stage")
    opened = dict(sums["num_requests_open", "class"])
    for kind, counts in stages.items():  # gateways count now, the router counted up to a second ago
        counts[_NEW] = max(0, opened.get(kind, 0) - sum(counts.values()))
        opened[kind] = sum(counts.values())
    lacks = [] if exposed else [f"no figures: {said_by(figures)}"]
    lacks += [] if "parts" in told else ["no parts: for keys with the scope dashboard"]
    return DeploymentStatus(
        state=told["state"],
        models=told["models"],
        promise=told.get("promise"),
        **{name: told.get(name, nothing) for name, nothing in _UNTOLD.items()},
        open=opened,
        served=dict(sums["request_success", "class"]),
        failed={kind: ends.get("error", 0) for kind, ends in _by_class(exposed, "request_success", _FINISH).items()},
        refused=dict(sums["admission_rejections", "class"]),
        ttft_s=_ttfts_s(exposed),
        attained=dict(sums["slo_attained", "class"]),
        missed=_by_class(exposed, "slo_missed", "why"),
        stages=stages,
        pool_pages=dict(sums["kv_pool_pages", "state"]),
        lacks="; ".join(lacks),
    )


def _samples(exposition: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the name, the labels and the value of each sample, without the prefix that the deployment gives names."""
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            yield sample.name.partition(":")[2].removesuffix("_total"), sample.labels, sample.value


def _sums(exposition: str) -> dict[tuple[str, str], dict[str, int]]:
    """Return (metric, label) -> label's value -> sum over the other labels."""
    sums: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, labels, number in _samples(exposition):
        for label, value in labels.items():
            sums[name, label][value] += int(number)
    return sums


def _by_class(exposition: str, name: str, label: str) -> dict[str, dict[str, int]]:
    """Return class -> the label's value -> the metric's sum over all gateways."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for sample, labels, number in _samples(exposition):
        if sample == name:
            found[labels["class"]][labels[label]] += int(number)
    return {kind: dict(counts) for kind, counts in found.items()}


def _ttfts_s(exposition: str) -> dict[str, dict[str, float]]:
    """Return class -> share of its requests -> the bound of the bucket within which their first token came."""
    found = {}
    for kind, counts in _by_class(exposition, "time_to_first_token_seconds_bucket", "le").items():
        within = sorted((float(le), count) for le, count in counts.items())
        every = within[-1][1]
        shares = (("half", 0.5), ("95 %", 0.95)) if every else ()
        ends = {name: next(le for le, count in within if count >= share * every) for name, share in shares}
        found[kind] = {name: le for name, le in ends.items() if isfinite(le)}
    return found


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
