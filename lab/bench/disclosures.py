"""The nine facts that a load test must disclose by Red Hat's suite for CPUs, which follows a draft of the IETF.

The client knows six of them. Of the server's precision, quantization and image it knows what its user says with
`--disclose`: no API tells them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from alignedserve.errors import AlignedServeError
from alignedserve.lab.loads.workload import Mixture
from alignedserve.lab.loads.workload.pace import AtOnce, ClosedArrivals, Gamma, Recorded
from alignedserve.lab.loads.workload.stream import Stream

NINE = ("boundary", "tokenizer", "stream", "clock", "precision", "quantization", "load", "arrivals", "images")


def disclosures(workload: Mixture, in_words: bool, told: Sequence[str] = ()) -> dict[str, str]:
    """Return the nine facts. A fact in `told`, as NAME=TEXT, replaces what the client knows."""
    words = "prompts are plain words, which the server tokenizes; tokens of answers are counted as the notes say"
    ids = "none: prompts are token ids, drawn from the lowest of the vocabulary"
    known = {
        "boundary": "the HTTP API of the server, with all behind it; the client's own time to send is outside",
        "tokenizer": words if in_words else ids,
        "stream": "server-sent events",
        "clock": "one: the client's monotonic clock; no time of the server is used",
        "load": "; ".join(dict.fromkeys(map(_load, workload.streams))),
        "arrivals": "; ".join(f"{stream.name}: {_arrivals(stream)}" for stream in workload.streams),
        "images": f"no image told; the client is alignedserve {_version()}",
    }
    return dict.fromkeys(NINE, "not told: --disclose says it") | known | _pairs(told)


def _pairs(told: Sequence[str]) -> dict[str, str]:
    found = {name: text for name, _, text in (pair.partition("=") for pair in told)}
    for name, text in found.items():
        if name not in NINE or not text:
            raise AlignedServeError(f"--disclose {name}: write NAME=TEXT with one of {', '.join(NINE)}")
    return found


def _load(stream: Stream) -> str:
    is_closed = isinstance(stream.arrivals, ClosedArrivals)
    return "closed loop" if is_closed else "all at once" if isinstance(stream.arrivals, AtOnce) else "open loop"


def _arrivals(stream: Stream) -> str:
    arrivals = stream.arrivals
    if isinstance(arrivals, ClosedArrivals):
        return f"{arrivals.in_flight} in flight, the next when one has ended"
    if isinstance(arrivals, Gamma):
        kind = "Poisson" if arrivals.cv == 1 else f"gamma, coefficient of variation {arrivals.cv:g}"
        return f"{arrivals.rate:g} a second, {kind}"
    return "at the times of a trace" if isinstance(arrivals, Recorded) else type(arrivals).__name__.lower()


def _version() -> str:
    try:
        return version("alignedserve")
    except PackageNotFoundError:
        return "uninstalled"
