"""Draw docs/peers.svg and its dark twin, the picture on the README's first screen: AlignedServe beside others on CPUs.

    python tools/draw_peers.py

Every figure in the picture comes from a file in lab/benchmarks/results. The chats beside vLLM are those of
`python -m lab.benchmarks.isolation --seconds 30`; vLLM's server got the same load, from a separate client before that
benchmark had `--url`, with servers started as the benchmark's help says.
The engines are those of `python -m lab.benchmarks.engine --peer-python PATH --peers vLLM`.

With CROWD and REAL_ENGINES it shows real weights beside llama.cpp: those of `python -m lab.benchmarks.crowd` and of
`python -m lab.benchmarks.engine`, each with `--model FILE.gguf --llama-cpp FOLDER`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "lab" / "benchmarks" / "results"
PICTURE, DARK = ROOT / "docs" / "peers.svg", ROOT / "docs" / "peers-dark.svg"

MACHINES = {  # name of a machine in the picture -> file with its engines' figures
    "Zen 4": "2026-11-21-engine-zen4",
    "Xeon, AMX": "2026-11-29-engine-amx",
    "Zen 5, older code": "2026-11-21-engine-epyc",
}
CROWD: str = "2026-11-30-crowd-vnni-2"  # file with what people at once got from one real model; or empty
# Name of a machine in the picture -> file with the figures of its engines on a real model; or empty.
REAL_ENGINES: Mapping[str, str] = {"Xeon, VNNI": "2026-11-30-engine-vnni-qwen15"}
OURS, PEER, SLOWER = "#0b84b8", "#8a8f96", "#d9661f"
INKS = {PICTURE: "#16191d", DARK: "#e8ebef"}  # of text and lines; the ground is the page's own


class ChatsBar(NamedTuple):
    """The share of chats in time beside documents, and the tokens that the documents got meanwhile."""

    label: str
    is_ours: bool
    attained: float  # percent of chats
    tokens_per_s: float  # of the documents

    @property
    def text(self) -> str:
        return f"{self.attained:.0f} %, documents {self.tokens_per_s:.0f} tokens/s"


def rows(name: str) -> list[Mapping[str, object]]:
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def chats() -> list[ChatsBar]:
    """Return the four bars: both servers under both promises."""
    peers = {str(row["tag"]): row for row in rows("2026-11-21-coserve-vllm-zen4") if row["mode"] == "both"}
    ours = {str(row["name"]): row["value"] for row in rows("2026-11-21-isolation-zen4")}  # the last run's figures stay
    return [
        _peer_bar("vLLM 0.32 as shipped", peers["vllm-default"]),
        ChatsBar("AlignedServe", True, _number(ours["default: chats attained"]), _number(ours["default: BE"])),
        _peer_bar("vLLM 0.32, tuned by hand", peers["vllm-tuned"]),
        ChatsBar("AlignedServe", True, _number(ours["tight: chats attained"]), _number(ours["tight: BE"])),
    ]


def _peer_bar(label: str, row: Mapping[str, object]) -> ChatsBar:
    return ChatsBar(label, False, 100 * _number(row["attained"]), _number(row["be_tok_s"]))


def _number(value: object) -> float:
    assert isinstance(value, (int, float))
    return float(value)


class CrowdBar(NamedTuple):
    """When all people of a crowd had their answers, and when the first word came on average."""

    label: str
    is_ours: bool
    total_s: float
    first_s: float

    @property
    def text(self) -> str:
        return f"{self.total_s:.0f} s, first words after {self.first_s:.0f} s"


def crowds() -> list[CrowdBar]:
    """Return two bars for each crowd, llama.cpp's and ours, in the order of the file."""
    newest = {str(row["name"]): row for row in rows(CROWD)}
    what = ", ours: all answered after"
    bars = list[CrowdBar]()
    for people in (name.removesuffix(what) for name in newest if name.endswith(what)):
        total, first = newest[f"{people}{what}"], newest[f"{people}, ours: mean first token"]
        for label, column in (("llama.cpp", "baseline"), ("AlignedServe", "value")):
            is_ours = column == "value"
            bars.append(CrowdBar(f"{people}: {label}", is_ours, _number(total[column]), _number(first[column])))
    return bars


def speeds() -> dict[str, list[float]]:
    """Return how many times as fast as another engine ours is, a figure for each case, by machine or model."""
    return {name: sorted(_newest_ratios(file)) for name, file in (REAL_ENGINES or MACHINES).items()}


def peer() -> str:
    return "llama.cpp" if REAL_ENGINES else "vLLM"


def shown() -> list[str]:
    """Return the texts with figures in the picture."""
    bars: Sequence[ChatsBar | CrowdBar] = crowds() if CROWD else chats()
    return [*(bar.text for bar in bars), *map(speed_text, speeds().values())]


def _newest_ratios(name: str) -> Iterator[float]:
    newest = {str(row["name"]): row["ratio"] for row in rows(name)}
    return (_number(ratio) for case, ratio in newest.items() if case.endswith(f"against {peer()}"))


def speed_text(ratios: Sequence[float]) -> str:
    return f"{len(ratios)} cases: {min(ratios):.2f} to {max(ratios):.2f}"


def draw(path: Path, ink: str) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    inked: dict[Any, str] = dict.fromkeys(names, ink)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "peers", "font.size": 8.5, **inked}):
        figure = Figure(figsize=(9.2, 3.1), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        (_draw_crowds if CROWD else _draw_chats)(left, ink)
        _draw_speeds(right, ink)
        for axes in (left, right):
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(left=False)
            axes.set_facecolor("none")
        figure.savefig(path, metadata={"Date": None}, transparent=True)


def _draw_chats(axes: Axes, ink: str) -> None:
    places = (3.6, 2.8, 1.2, 0.4)
    for place, bar in zip(places, chats(), strict=True):
        axes.barh(place, bar.attained, height=0.6, color=OURS if bar.is_ours else PEER)
        is_inside = bar.attained > 50
        place_x = 2 if is_inside else bar.attained + 1.5
        axes.text(place_x, place, bar.text, va="center", color="white" if is_inside else ink)
    axes.set_yticks(places, [bar.label for bar in chats()])
    axes.text(0, 4.25, "promise: first token in 1 s, then one each 187.5 ms", style="italic")
    axes.text(0, 1.85, "promise: 0.3 s and 60 ms (our goal of 95 %: missed)", style="italic")
    axes.set_ylim(-0.1, 4.8)
    axes.set_xlim(0, 100)
    axes.set_xlabel("chats that kept their promise, %; 160 M Llama on a Zen 4")
    axes.set_title("Chats beside documents that never end", loc="left", weight="bold", pad=16)


def _draw_crowds(axes: Axes, ink: str) -> None:
    bars = crowds()
    longest = max(bar.total_s for bar in bars)
    places = [len(bars) - at + 0.3 * (at % 2) for at in range(len(bars))]  # two of a crowd lie together
    for place, bar in zip(places, bars, strict=True):
        axes.barh(place, bar.total_s, height=0.6, color=OURS if bar.is_ours else PEER)
        is_inside = bar.total_s > 0.6 * longest
        place_x = 0.02 * longest if is_inside else bar.total_s + 0.015 * longest
        axes.text(place_x, place, bar.text, va="center", color="white" if is_inside else ink)
    axes.set_yticks(places, [bar.label for bar in bars])
    axes.set_xlabel("seconds until all are answered; Qwen2.5-Coder 1.5B, two cores")
    axes.set_title("People who ask at once", loc="left", weight="bold", pad=16)


def _draw_speeds(axes: Axes, ink: str) -> None:
    measured = speeds()
    for place, ratios in enumerate(reversed(measured.values())):
        axes.scatter(ratios, [place] * len(ratios), s=18, color=[OURS if ratio >= 1 else SLOWER for ratio in ratios])
        axes.text(1.06, place + 0.2, speed_text(ratios))
    axes.axvline(1, color=ink, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.text(1.0, len(measured) - 0.35, f"as fast as {peer()}", ha="left", va="bottom")
    axes.set_yticks(range(len(measured)), list(reversed(measured)))
    axes.set_ylim(-0.5, len(measured) - 0.35)
    axes.set_xlim(0.8, 3)
    of = "llama.cpp's" if REAL_ENGINES else "vLLM 0.32"
    axes.set_xlabel(f"tokens/s, times {of}; a dot is a case")
    axes.set_title("The engine alone", loc="left", weight="bold", pad=16)


if __name__ == "__main__":
    for picture, ink in INKS.items():
        draw(picture, ink)
