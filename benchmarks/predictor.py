"""Measure how well and how fast output lengths are predicted, and the gain (docs/how/prediction.md).

    python -m benchmarks.predictor --texts DIR [--minilm] [--tokenizer FILE] [--simulate] [--seeds 2]
    python -m benchmarks.predictor --demo FILE [--prompts 1500]

DIR has files NAME.jsonl.gz, a line each {"prompt": ..., "response": ...}. A fifth of each file's prompts is held out,
and all figures are over the held-out prompts. FILE keeps the demo model's answers to prompts of its own corpus; if it
is missing, the benchmark starts a server and asks it. --simulate plays the held-out prompts through a simulated
deployment.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from time import perf_counter, thread_time

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.core import Sketch
from alignedserve.router.prediction.neighbours import PastPrompts
from alignedserve.router.prediction.predictor import Encoder, HashEncoder, LengthModel, Vectors
from alignedserve.scheduling.sketch import DIMENSIONS, sketch_of
from benchmarks.common.predictor_simulated import Said, simulated
from benchmarks.common.serving import ask_chat, serve
from benchmarks.report import command, print_line

_HELD_OUT = 5  # a held-out prompt for this many prompts
_PAIRS = 200_000
_CLASSES = 5
_USUAL_MOST = 1024  # max_tokens of a client that chose no careful value
_RIDGE = 30.0
_AT_ONCE, _MOST = 32, 640  # requests to the demo model, and tokens of an answer

Lengths = NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    past: list[Said]
    held_out: list[Said]  # no prompt of these is in the past

    def from_source(self, source: str) -> Split:
        return Split(*([said for said in part if said.source == source] for part in (self.past, self.held_out)))


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--texts", type=Path, help="folder of NAME.jsonl.gz with prompts and responses")
    parser.add_argument(
        "--tokenizer", type=Path, default=DEMO_FOLDER / "tokenizer.json", help="tokenizer that counts the tokens"
    )
    parser.add_argument("--demo", type=Path, help="file of the demo model's answers; made if it is missing")
    parser.add_argument("--prompts", type=int, default=1500, help="number of prompts for the demo model")
    parser.add_argument("--most", type=int, default=6000, help="past and held-out prompts, drawn from all of them")
    parser.add_argument("--minilm", action="store_true", help="with the encoder of the extra predictor")
    parser.add_argument("--simulate", action="store_true", help="simulate the gain")
    parser.add_argument("--regime", default="", help="only regimes whose name contains this text")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    if options.texts is None and options.demo is None:
        parser.error("nothing to predict: give --texts or --demo")
    if options.demo is not None:
        accuracy("demo", split(said_by_demo(options.demo, options.prompts)), options.minilm)
    if options.texts is not None:
        texts(options)


def texts(options: argparse.Namespace) -> None:
    everything = split(list(read(options.texts, Tokenizer.from_file(str(options.tokenizer)))))
    draw = Random("most")
    sampled = Split(
        *(draw.sample(part, min(len(part), options.most)) for part in (everything.past, everything.held_out))
    )
    if options.simulate:
        play(sampled, options)
        return
    speed(sampled, options.minilm)
    for source in sorted({answer.source for answer in everything.past}):
        accuracy(source, everything.from_source(source), with_minilm=False)
    accuracy("all", sampled, options.minilm)


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


def said_by_demo(path: Path, count: int) -> list[Said]:
    """Return the demo model's answers to prompts of its own corpus, from the file or, if it is missing, by asking."""
    if not path.exists():
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
        from demo_corpus import Draw, sample
        from demo_corpus import Split as Part

        asked = [sample(Draw(f"asked {number}", Part.HELD_OUT)) for number in range(count)]
        with serve("demo", "--topology", "colocated") as deployment:
            rows = asyncio.run(_answers(deployment.url, [(answer.kind, answer.messages) for answer in asked]))
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [Said(kind, text, tuple(prompt), length) for kind, text, prompt, length in map(json.loads, file)]


async def _answers(url: str, conversations: Sequence[tuple[str, list[dict[str, str]]]]) -> list[tuple[object, ...]]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def answer(kind: str, messages: list[dict[str, str]]) -> tuple[object, ...]:
        async with places:
            said = await ask_chat(url, messages, _MOST)
        text = "\n".join(message["content"] for message in messages)
        return kind, text, said["prompt_token_ids"], said["usage"]["completion_tokens"]

    return await asyncio.gather(*(answer(kind, messages) for kind, messages in conversations))


def split(said: Sequence[Said]) -> Split:
    texts = sorted({answer.text for answer in said})
    held = set(Random("held out").sample(texts, len(texts) // _HELD_OUT))
    return Split(
        [answer for answer in said if answer.text not in held], [answer for answer in said if answer.text in held]
    )


# --- How well


def accuracy(name: str, of: Split, with_minilm: bool) -> None:
    if len(of.held_out) < 20:
        return
    edges = np.quantile([answer.num_output for answer in of.past], np.arange(1, _CLASSES) / _CLASSES)
    for predictor, (means, uppers) in predictions(of, with_minilm):
        figures = figures_of(np.array([answer.num_output for answer in of.held_out], dtype=float), means, uppers, edges)
        head = {"name": f"predictor/{name}", "predictor": predictor, "past": len(of.past), "held_out": len(of.held_out)}
        print_line(head | figures)


def predictions(of: Split, with_minilm: bool) -> Iterator[tuple[str, tuple[Lengths, Lengths | None]]]:
    past, asked = (np.array([answer.num_output for answer in part], dtype=float) for part in (of.past, of.held_out))
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
    known = [answer for answer in said if answer is not None]
    means = np.array([answer.mean for answer in known], dtype=float)
    return means, None if least is not None else np.array([answer.upper for answer in known], dtype=float)


def _sketches(name: str) -> Callable[[Said], Sketch]:
    return (lambda answer: sketch_of(answer.prompt)) if name == "hash" else (lambda answer: Sketch(text=answer.text))


def _minilm() -> Encoder:
    from alignedserve.router.side.minilm import MiniLM

    return MiniLM()


class _Remembering:
    """An encoder that embeds each text once. No benchmark times this encoder."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self.dimensions = encoder, encoder.dimensions
        self._known: dict[str, Vectors] = {}

    def vectors(self, sketches: Sequence[Sketch]) -> Vectors:
        new = list(dict.fromkeys(answer.text for answer in sketches if answer.text not in self._known))
        for at in range(0, len(new), 16):
            some = new[at : at + 16]
            self._known |= zip(some, self._encoder.vectors([Sketch(text=text) for text in some]), strict=True)
        return np.stack([self._known[answer.text] for answer in sketches])


@cache
def _remembering_minilm() -> Encoder:
    return _Remembering(_minilm())


def _asked(said: Sequence[Said], sketch: Callable[[Said], Sketch]) -> tuple[list[Sketch], list[int]]:
    return [sketch(answer) for answer in said], [len(answer.prompt) for answer in said]


def _taught(encoder: Encoder, past: Sequence[Said], sketch: Callable[[Said], Sketch]) -> LengthModel:
    model = LengthModel(encoder)
    for at in range(0, len(past), 32):
        some = past[at : at + 32]
        model.learn(*_asked(some, sketch), [answer.num_output for answer in some])
    for _ in model.train():
        pass
    return model


def _by_prompt_length(of: Split) -> Lengths:
    """Fit a line through the logarithms of prompt and output lengths."""
    x, y = (
        np.log([f(answer) for answer in of.past])
        for f in (lambda answer: len(answer.prompt), lambda answer: answer.num_output)
    )
    slope, offset = np.polyfit(x, y, 1)
    factor = np.exp(y).mean() / np.exp(offset + slope * x).mean()
    return np.asarray(factor * np.exp(offset + slope * np.log([len(answer.prompt) for answer in of.held_out])))


def _by_the_others(said: Sequence[Said]) -> Lengths | None:
    """Return the mean of all other answers to the same prompt: what sees only the prompt cannot know more."""
    total: dict[str, list[int]] = {}
    for answer in said:
        total.setdefault(answer.text, []).append(answer.num_output)
    if min(map(len, total.values())) < 2:
        return None
    others = [total[answer.text] for answer in said]
    return np.array(
        [(sum(mine) - answer.num_output) / (len(mine) - 1) for answer, mine in zip(said, others, strict=True)]
    )


def _ridge(of: Split) -> Lengths:
    """Fit the same inputs as the network has to the same logarithms."""
    model = LengthModel(HashEncoder())
    past, asked = (
        model.inputs(
            np.stack([np.frombuffer(sketch_of(answer.prompt).counts, np.int8) for answer in part]),
            np.array([len(answer.prompt) for answer in part]),
        )
        for part in (of.past, of.held_out)
    )
    y = np.log([answer.num_output for answer in of.past])
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
    """Return the share of pairs of unequal lengths that are in order; a pair with equal predictions counts half."""
    first, second = np.random.default_rng(0).integers(0, len(actual), (2, _PAIRS))
    differ = actual[first] != actual[second]
    way, guess = np.sign(actual[first] - actual[second])[differ], np.sign(said[first] - said[second])[differ]
    return float(np.where(guess == 0, 0.5, way == guess).mean())


# --- How fast


def speed(of: Split, with_minilm: bool) -> None:
    prompts = [answer.prompt for answer in of.held_out[:400]]
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
    """Time prompts one by one, then other prompts eight together: what was embedded is not embedded again."""
    model = _taught(encoder, of.past[:1000], _sketches(name))
    asked, lengths = _asked(of.held_out[: 2 * count], _sketches(name))
    past = f"{len(model.past)} past prompts"
    took(f"{name}, one by one, {past}", count, lambda at: model.predict([asked[at]], [lengths[at]]))

    def eight(at: int) -> object:
        here = slice(count + 8 * at, count + 8 * at + 8)
        return model.predict(asked[here], lengths[here])

    took(f"{name}, eight together, {past}", count // 8, eight, of=8)


def took(name: str, count: int, call: Callable[[int], object], of: int = 1) -> None:
    """Report seconds by the clock on the wall and, for a busy machine, of the processor's time."""
    seconds, busy = list[float](), list[float]()
    for at in range(count):
        began_at, was_busy = perf_counter(), thread_time()
        call(at)
        busy.append((thread_time() - was_busy) / of)
        seconds.append((perf_counter() - began_at) / of)
    figures = {"p50_us": (seconds, 50), "p99_us": (seconds, 99), "cpu_p50_us": (busy, 50), "cpu_p99_us": (busy, 99)}
    line = {key: float(1e6 * np.percentile(some, percent)) for key, (some, percent) in figures.items()}
    print_line({"name": "predictor/seconds", "what": name, **line})


# --- What it buys


def play(of: Split, options: argparse.Namespace) -> None:
    vectors: dict[tuple[int, ...], bytes] = {}
    if options.minilm:
        encoder, texts = _remembering_minilm(), {answer.prompt: answer.text for answer in (*of.past, *of.held_out)}
        prompts = list(texts)
        for at in range(0, len(prompts), 32):
            some = prompts[at : at + 32]
            found = encoder.vectors([Sketch(text=texts[prompt]) for prompt in some])
            vectors |= {prompt: vector.tobytes() for prompt, vector in zip(some, found, strict=True)}
    for line in simulated(of.past, of.held_out, vectors, range(options.seeds), options.regime):
        print_line(line)


if __name__ == "__main__":
    main()
