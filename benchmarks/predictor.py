"""How well lengths of outputs are predicted, how fast, and what that buys (docs/how/prediction.md).

    python -m benchmarks.predictor --texts DIR [--minilm] [--tokenizer FILE] [--simulate] [--seeds 2]
    python -m benchmarks.predictor --demo FILE [--prompts 1500]

DIR has files NAME.jsonl.gz, a line each {"prompt": ..., "response": ...}. A fifth of each file's prompts are held out
of everything: what is said is of them alone. FILE keeps what the demo model has said to prompts of its own corpus;
where it is not there, a server is started and asked. --simulate plays the held-out prompts through a simulated
deployment.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from time import perf_counter, thread_time

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from alignedserve.core import Sketch
from alignedserve.router.prediction.neighbours import PastPrompts
from alignedserve.router.prediction.predictor import Encoder, HashEncoder, LengthModel, Vectors
from alignedserve.scheduling.sketch import DIMENSIONS, sketch_of
from benchmarks.predictor_simulated import Played, simulated

_FOLDER = Path(__file__).resolve().parents[1] / "alignedserve" / "demo_model"
_HELD_OUT = 5  # one prompt of so many
_PAIRS = 200_000
_CLASSES = 5
_USUAL_MOST = 1024  # max_tokens of a client that has not thought about it
_RIDGE = 30.0

Lengths = NDArray[np.float64]


@dataclass(frozen=True)
class Said:
    """A prompt and how long one answer to it was."""

    source: str
    text: str
    prompt: tuple[int, ...]
    num_output: int


@dataclass(frozen=True)
class Split:
    past: list[Said]
    held_out: list[Said]  # none of whose prompts is in the past

    def of(self, source: str) -> Split:
        return Split(*([one for one in part if one.source == source] for part in (self.past, self.held_out)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="folder of NAME.jsonl.gz with prompts and responses")
    parser.add_argument("--tokenizer", type=Path, default=_FOLDER / "tokenizer.json", help="whose tokens are counted")
    parser.add_argument("--demo", type=Path, help="file of what the demo model has said; made where it is missing")
    parser.add_argument("--prompts", type=int, default=1500, help="asked of the demo model")
    parser.add_argument("--most", type=int, default=6000, help="past and held-out prompts, drawn from all of them")
    parser.add_argument("--minilm", action="store_true", help="with the encoder of the extra predictor")
    parser.add_argument("--simulate", action="store_true", help="what it buys")
    parser.add_argument("--regime", default="", help="only those whose name has this in it")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    if options.texts is None and options.demo is None:
        parser.error("nothing to predict: give --texts or --demo")
    if options.demo is not None:
        from benchmarks.predictor_demo import said_by_demo

        said = [Said(*one) for one in said_by_demo(options.demo, options.prompts)]
        accuracy("demo", split(said), options.minilm)
    if options.texts is not None:
        texts(options)


def texts(options: argparse.Namespace) -> None:
    everything = split(list(read(options.texts, Tokenizer.from_file(str(options.tokenizer)))))
    draw = Random("most")
    some = Split(*(draw.sample(part, min(len(part), options.most)) for part in (everything.past, everything.held_out)))
    if options.simulate:
        play(some, options)
        return
    speed(some, options.minilm)
    for source in sorted({one.source for one in everything.past}):
        accuracy(source, everything.of(source), with_minilm=False)
    accuracy("all", some, options.minilm)


def read(folder: Path, tokenizer: Tokenizer) -> Iterator[Said]:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        prompts = tokenizer.encode_batch([row["prompt"] for row in rows])
        answers = tokenizer.encode_batch([row["response"] or "" for row in rows])
        for row, prompt, answer in zip(rows, prompts, answers, strict=True):
            if prompt.ids and answer.ids:
                yield Said(path.name.partition(".")[0], row["prompt"], tuple(prompt.ids), len(answer.ids))


def split(said: Sequence[Said]) -> Split:
    texts = sorted({one.text for one in said})
    held = set(Random("held out").sample(texts, len(texts) // _HELD_OUT))
    return Split([one for one in said if one.text not in held], [one for one in said if one.text in held])


# --- How well


def accuracy(name: str, of: Split, with_minilm: bool) -> None:
    if len(of.held_out) < 20:
        return
    edges = np.quantile([one.num_output for one in of.past], np.arange(1, _CLASSES) / _CLASSES)
    for predictor, (means, uppers) in predictions(of, with_minilm):
        figures = figures_of(np.array([one.num_output for one in of.held_out], dtype=float), means, uppers, edges)
        head = {"name": f"predictor/{name}", "predictor": predictor, "past": len(of.past), "held_out": len(of.held_out)}
        say(head | figures)


def predictions(of: Split, with_minilm: bool) -> Iterator[tuple[str, tuple[Lengths, Lengths | None]]]:
    past, asked = (np.array([one.num_output for one in part], dtype=float) for part in (of.past, of.held_out))
    yield "constant", (np.full(len(asked), past.mean()), np.full(len(asked), np.quantile(past, 0.9)))
    yield "max_tokens", (np.full(len(asked), float(_USUAL_MOST)), None)
    yield "prompt length", (_by_prompt_length(of), None)
    if (ceiling := _by_the_others(of.held_out)) is not None:
        yield "perfect per prompt", (ceiling, None)
    yield "ridge on hash", (_ridge(of), None)
    encoders: dict[str, Callable[[], Encoder]] = {"hash": HashEncoder}
    if with_minilm:
        encoders["minilm"] = _remembering_minilm
    for name, encoder in encoders.items():
        model = _taught(encoder(), of.past, _sketches(name))
        sketches, lengths = _asked(of.held_out, _sketches(name))
        yield name, _said(model, sketches, lengths)
        for ways, least in (("neighbours alone", -1.0), ("network alone", 2.0)):
            yield f"{name}, {ways}", _said(model, sketches, lengths, least)


def _said(
    model: LengthModel, sketches: list[Sketch], lengths: list[int], least: float | None = None
) -> tuple[Lengths, Lengths | None]:
    said = model.predict(sketches, lengths, least)
    known = [one for one in said if one is not None]
    means = np.array([one.mean for one in known], dtype=float)
    return means, None if least is not None else np.array([one.upper for one in known], dtype=float)


def _sketches(name: str) -> Callable[[Said], Sketch]:
    return (lambda one: sketch_of(one.prompt)) if name == "hash" else (lambda one: Sketch(text=one.text))


def _minilm() -> Encoder:
    from alignedserve.router.side.minilm import MiniLM

    return MiniLM()


class _Remembering:
    """Embeds each text once: nothing is timed with this."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self.dimensions = encoder, encoder.dimensions
        self._known: dict[str, Vectors] = {}

    def vectors(self, sketches: Sequence[Sketch]) -> Vectors:
        new = list(dict.fromkeys(one.text for one in sketches if one.text not in self._known))
        for at in range(0, len(new), 16):
            some = new[at : at + 16]
            self._known |= zip(some, self._encoder.vectors([Sketch(text=text) for text in some]), strict=True)
        return np.stack([self._known[one.text] for one in sketches])


@cache
def _remembering_minilm() -> Encoder:
    return _Remembering(_minilm())


def _asked(said: Sequence[Said], sketch: Callable[[Said], Sketch]) -> tuple[list[Sketch], list[int]]:
    return [sketch(one) for one in said], [len(one.prompt) for one in said]


def _taught(encoder: Encoder, past: Sequence[Said], sketch: Callable[[Said], Sketch]) -> LengthModel:
    model = LengthModel(encoder)
    for at in range(0, len(past), 32):
        some = past[at : at + 32]
        model.learn(*_asked(some, sketch), [one.num_output for one in some])
    for _ in model.train():
        pass
    return model


def _by_prompt_length(of: Split) -> Lengths:
    """A line through the logarithms of both."""
    x, y = (np.log([f(one) for one in of.past]) for f in (lambda one: len(one.prompt), lambda one: one.num_output))
    slope, offset = np.polyfit(x, y, 1)
    factor = np.exp(y).mean() / np.exp(offset + slope * x).mean()
    return np.asarray(factor * np.exp(offset + slope * np.log([len(one.prompt) for one in of.held_out])))


def _by_the_others(said: Sequence[Said]) -> Lengths | None:
    """The mean of all other answers to the same prompt: nobody who sees only the prompt can know more."""
    total: dict[str, list[int]] = {}
    for one in said:
        total.setdefault(one.text, []).append(one.num_output)
    if min(map(len, total.values())) < 2:
        return None
    others = [total[one.text] for one in said]
    return np.array([(sum(mine) - one.num_output) / (len(mine) - 1) for one, mine in zip(said, others, strict=True)])


def _ridge(of: Split) -> Lengths:
    """On the same inputs as the network has, to the same logarithms."""
    model = LengthModel(HashEncoder())
    past, asked = (
        model.inputs(
            np.stack([np.frombuffer(sketch_of(one.prompt).counts, np.int8) for one in part]),
            np.array([len(one.prompt) for one in part]),
        )
        for part in (of.past, of.held_out)
    )
    y = np.log([one.num_output for one in of.past])
    center = y.mean()
    weights = np.linalg.solve(past.T @ past + _RIDGE * np.eye(past.shape[1]), past.T @ (y - center))
    factor = np.exp(y).mean() / np.exp(center + past @ weights).mean()
    return np.asarray(factor * np.exp(center + asked @ weights))


def figures_of(actual: Lengths, means: Lengths, uppers: Lengths | None, edges: Lengths) -> dict[str, float | None]:
    logs, said = np.log(actual), np.log(np.maximum(1.0, means))
    classes = np.searchsorted(edges, actual) == np.searchsorted(edges, means)
    return {
        "mae": float(np.abs(actual - means).mean()),
        "r2": _r2(actual, means),
        "r2_log": _r2(logs, said),
        "pairs_in_order": _pairs(actual, means),
        "five_classes": float(classes.mean()),
        "coverage": None if uppers is None else float((actual <= uppers).mean()),
        "upper_over_mean": None if uppers is None else float(uppers.mean() / actual.mean()),
    }


def _r2(actual: Lengths, said: Lengths) -> float:
    return float(1 - ((actual - said) ** 2).sum() / ((actual - actual.mean()) ** 2).sum())


def _pairs(actual: Lengths, said: Lengths) -> float:
    """Of two whose lengths differ; one of which nothing is said counts half."""
    one, other = np.random.default_rng(0).integers(0, len(actual), (2, _PAIRS))
    differ = actual[one] != actual[other]
    way, guess = np.sign(actual[one] - actual[other])[differ], np.sign(said[one] - said[other])[differ]
    return float(np.where(guess == 0, 0.5, way == guess).mean())


# --- How fast


def speed(of: Split, with_minilm: bool) -> None:
    prompts = [one.prompt for one in of.held_out[:400]]
    took("hash, sketch at the gateway", len(prompts), lambda at: sketch_of(prompts[at]))
    _speed_of("hash", HashEncoder(), of, 400)
    if with_minilm:
        _speed_of("minilm", _minilm(), of, 80)
    vectors = np.random.default_rng(0).integers(0, 2, (50_000, DIMENSIONS), dtype=np.int8)
    past = PastPrompts(DIMENSIONS)
    for count in (10_000, 50_000):
        for vector in vectors[len(past) : count]:
            past.add(vector, 1, 1)
        took(f"search of {count} past prompts", 60, lambda at: past.similar(vectors[at : at + 1], 8))


def _speed_of(name: str, encoder: Encoder, of: Split, count: int) -> None:
    """First one by one, then others eight together: what was embedded is not embedded again."""
    model = _taught(encoder, of.past[:1000], _sketches(name))
    asked, lengths = _asked(of.held_out[: 2 * count], _sketches(name))
    past = f"{len(model.past)} past prompts"
    took(f"{name}, one by one, {past}", count, lambda at: model.predict([asked[at]], [lengths[at]]))

    def eight(at: int) -> object:
        here = slice(count + 8 * at, count + 8 * at + 8)
        return model.predict(asked[here], lengths[here])

    took(f"{name}, eight together, {past}", count // 8, eight, of=8)


def took(name: str, count: int, call: Callable[[int], object], of: int = 1) -> None:
    """By the clock on the wall and, for whoever measures on a busy machine, of the processor's time."""
    seconds, busy = list[float](), list[float]()
    for at in range(count):
        began_at, was_busy = perf_counter(), thread_time()
        call(at)
        busy.append((thread_time() - was_busy) / of)
        seconds.append((perf_counter() - began_at) / of)
    figures = {"p50_us": (seconds, 50), "p99_us": (seconds, 99), "cpu_p50_us": (busy, 50), "cpu_p99_us": (busy, 99)}
    line = {key: float(1e6 * np.percentile(some, percent)) for key, (some, percent) in figures.items()}
    say({"name": "predictor/seconds", "what": name, **line})


# --- What it buys


def play(of: Split, options: argparse.Namespace) -> None:
    ids = {one.prompt: one for one in (*of.past, *of.held_out)}
    vectors: dict[tuple[int, ...], bytes] = {}
    if options.minilm:
        encoder = _remembering_minilm()
        needed = list(ids)
        for at in range(0, len(needed), 32):
            some = needed[at : at + 32]
            for prompt, vector in zip(some, encoder.vectors([Sketch(text=ids[one].text) for one in some]), strict=True):
                vectors[prompt] = vector.tobytes()
    past, asked = ([Played(one.source, one.prompt, one.num_output) for one in part] for part in (of.past, of.held_out))
    for line in simulated(past, asked, vectors, range(options.seeds), options.regime):
        say(line)


def say(line: dict[str, object]) -> None:
    rounded = {key: float(f"{one:.4g}") if isinstance(one, float) else one for key, one in line.items()}
    print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main()
