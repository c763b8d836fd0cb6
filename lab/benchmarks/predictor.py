"""Measure how well and how fast output lengths are predicted, and the gain (docs/how/prediction.md).

    python -m lab.benchmarks.predictor --texts DIR [--minilm] [--tokenizer FILE] [--simulate [--unseen]] [--seeds 2]
    python -m lab.benchmarks.predictor --demo FILE

DIR has files NAME.jsonl.gz, a line each {"prompt": ..., "response": ...}. FILE keeps the demo model's answers to
320 prompts (tools/demo_conversations.py); if it is missing, the benchmark starts a server and asks it. Lines say what
was predicted:

    held out   a fifth of each file's prompts, from the others
    in order   each request of a file, from those before it
    unseen     held-out prompts of each file, from all other files
    shift      one file after another: the share of outputs within their upper estimates, of each 500 requests

--simulate plays the held-out prompts through a simulated deployment; --unseen those of each file, where only the other
files were learnt.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from random import Random
from time import perf_counter, thread_time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.core import Sketch
from alignedserve.lab.benchmarks.common.predictor_simulated import NUM_REQUESTS, Said, simulated
from alignedserve.lab.benchmarks.common.report import command, print_line
from alignedserve.lab.benchmarks.common.serving import ask_chat, serve
from alignedserve.router.prediction.length import FitTimes
from alignedserve.router.prediction.neighbours import PastPrompts
from alignedserve.router.prediction.predictor import Encoder, HashEncoder, LengthModel, Vectors
from alignedserve.scheduling.lengths import hinted
from alignedserve.scheduling.policy import DEFAULT_POLICY
from alignedserve.scheduling.sketch import DIMENSIONS, sketch_of

_HELD_OUT = 5  # a held-out prompt for this many prompts
_PAIRS = 200_000
_FIRST = 100  # requests that do not count where each is predicted from those before it
_BEFORE, _AFTER, _BLOCK = 1500, 1500, 500  # requests before and after the traffic changes
_USUAL_MOST = 1024  # max_tokens of a client that chose no careful value
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
    parser.add_argument("--most", type=int, default=6000, help="past and held-out prompts, drawn from all of them")
    parser.add_argument("--minilm", action="store_true", help="with the encoder of the extra predictor")
    parser.add_argument("--simulate", action="store_true", help="simulate the gain")
    parser.add_argument(
        "--unseen",
        action="store_true",
        help="with --simulate: each file by itself, and only the other files were learnt",
    )
    parser.add_argument("--regime", default="", help="only regimes whose name contains this text")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    if options.texts is None and options.demo is None:
        parser.error("nothing to predict: give --texts or --demo")
    if options.demo is not None:
        accuracy("demo", split(said_by_demo(options.demo)), options.minilm)
    if options.texts is not None:
        texts(options)


def texts(options: argparse.Namespace) -> None:
    said = list(read(options.texts, Tokenizer.from_file(str(options.tokenizer))))
    everything = split(said)
    draw = Random("most")
    sampled = Split(
        *(draw.sample(part, min(len(part), options.most)) for part in (everything.past, everything.held_out))
    )
    if options.simulate and options.unseen:
        for source, unseen_split in unseen_splits(sampled):
            play(unseen_split, options, {"asked": source})
        return
    if options.simulate:
        play(sampled, options, {})
        return
    speed(sampled, options.minilm)
    sources = sorted({answer.source for answer in said})
    for source in sources:
        accuracy(source, everything.from_source(source), with_minilm=False)
        in_order(source, [answer for answer in said if answer.source == source][: options.most])
        unseen(source, sampled)
    accuracy("all", sampled, options.minilm)
    for before, after in permutations(sources, 2):
        shift(before, after, said)


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


def said_by_demo(path: Path) -> list[Said]:
    """Return the demo model's answers to prompts of its kinds, from the file or, if it is missing, by asking."""
    if not path.exists():
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
        from demo_conversations import conversations

        asked = conversations()
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


class Prediction(NamedTuple):
    means: Lengths
    uppers: Lengths | None = None


def accuracy(name: str, of: Split, with_minilm: bool) -> None:
    """Predict held-out prompts from the past."""
    if len(of.held_out) >= 20:
        print_accuracy(f"held out/{name}", of.held_out, predictions(of, with_minilm), len(of.past))


def predictions(of: Split, with_minilm: bool) -> dict[str, Prediction]:
    past = np.array([answer.num_output for answer in of.past], dtype=float)
    everyone = np.ones(len(of.held_out))
    found = {"constant": Prediction(past.mean() * everyone, np.quantile(past, 0.9) * everyone)}
    found |= {"max_tokens": Prediction(_USUAL_MOST * everyone), "prompt length": Prediction(_by_prompt_length(of))}
    if (ceiling := _by_the_others(of.held_out)) is not None:
        found["perfect per prompt"] = Prediction(ceiling)
    encoders: dict[str, Callable[[], Encoder]] = {"hash": HashEncoder}
    if with_minilm:
        encoders["minilm"] = _remembering_minilm
    for name, encoder in encoders.items():
        found |= said_by(_taught(encoder(), of.past, _sketches(name)), encoder(), of.held_out, name)
    return found


def in_order(name: str, said: Sequence[Said]) -> None:
    """Predict each request from those before it."""
    found = in_turn(said, with_parts=True)
    counted = {
        way: Prediction(means[_FIRST:], None if uppers is None else uppers[_FIRST:])
        for way, (means, uppers) in found.items()
    }
    print_accuracy(f"in order/{name}", said[_FIRST:], counted, _FIRST)


def unseen(name: str, of: Split) -> None:
    """Predict requests of a file from those of all others."""
    others, asked = (
        [answer for answer in part if (answer.source == name) is here]
        for part, here in ((of.past, False), (of.held_out, True))
    )
    if len(asked) >= 20:
        print_accuracy(f"unseen/{name}", asked, predictions(Split(others, asked), with_minilm=False), len(others))


def shift(before: str, after: str, said: Sequence[Said]) -> None:
    """Report the share of outputs within the upper estimate after the traffic has changed."""
    first, then = ([answer for answer in said if answer.source == source] for source in (before, after))
    played = [*first[:_BEFORE], *then[:_AFTER]]
    if len(played) < _BEFORE + _AFTER:
        return
    uppers = in_turn(played)["hash"].uppers
    assert uppers is not None
    covered = np.array([answer.num_output for answer in played]) <= uppers
    shares = {f"from_{at}": float(covered[at : at + _BLOCK].mean()) for at in range(_BEFORE, len(played), _BLOCK)}
    print_line({"name": "predictor/shift", "before": before, "after": after, "block": _BLOCK, **shares})


def in_turn(said: Sequence[Said], with_parts: bool = False) -> dict[str, Prediction]:
    """Return what is said of each request after those before it were learnt, and are fitted as the router orders."""
    model, fits, encoder = LengthModel(HashEncoder()), FitTimes(), HashEncoder()
    told: list[dict[str, Prediction]] = []
    total, prior = 0, np.array([256.0])
    for number, answer in enumerate(said):
        sketches, lengths = _asked([answer], _sketches("hash"))
        parts = (
            said_by(model, encoder, [answer], "hash") if with_parts else {"hash": _estimates(model, sketches, lengths)}
        )
        told.append({"constant": Prediction(np.array([total / number]) if number else prior), **parts})
        total += answer.num_output
        model.learn(sketches, lengths, [answer.num_output])
        if fits.is_due():
            model.fit()
    return {way: _together([parts[way] for parts in told]) for way in told[0]}


def said_by(model: LengthModel, encoder: Encoder, asked: Sequence[Said], name: str) -> dict[str, Prediction]:
    """Return what the model says of these prompts, and what each of its parts says alone."""
    sketches, lengths = _asked(asked, _sketches(name))
    opinions = model.opinions(encoder.vectors(sketches), np.array(lengths))
    return {
        name: _estimates(model, sketches, lengths),
        f"{name}, neighbours alone": Prediction(opinions.by_past[:, -1]),
        f"{name}, regression alone": Prediction(opinions.by_ridge),
    }


def _estimates(model: LengthModel, sketches: list[Sketch], lengths: list[int]) -> Prediction:
    said = [estimate or hinted(DEFAULT_POLICY.expected_output) for estimate in model.predict(sketches, lengths)]
    return Prediction(
        *(np.array(values, dtype=float) for values in zip(*((s.mean, s.upper) for s in said), strict=True))
    )


def _together(parts: Sequence[Prediction]) -> Prediction:
    means, uppers = np.concatenate([part.means for part in parts]), [part.uppers for part in parts]
    return Prediction(
        means, None if uppers[0] is None else np.concatenate([upper for upper in uppers if upper is not None])
    )


def print_accuracy(name: str, asked: Sequence[Said], found: dict[str, Prediction], num_past: int) -> None:
    actual = np.array([answer.num_output for answer in asked], dtype=float)
    for way, (means, uppers) in found.items():
        head = {"name": f"predictor/{name}", "predictor": way, "past": num_past, "asked": len(asked)}
        print_line(head | figures_of(actual, means, uppers))


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
    model, fits = LengthModel(encoder), FitTimes()
    for answer in past:
        model.learn(*_asked([answer], sketch), [answer.num_output])
        if fits.is_due():
            model.fit()
    model.fit()
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


def figures_of(actual: Lengths, means: Lengths, uppers: Lengths | None) -> dict[str, float | None]:
    logs, said = np.log(actual), np.log(np.maximum(1.0, means))
    return {
        "mae": float(np.abs(actual - means).mean()),
        "r2": _r2(actual, means),
        "r2_log": _r2(logs, said),
        "pairs_in_order": _pairs(actual, means),
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


def unseen_splits(of: Split) -> Iterator[tuple[str, Split]]:
    """Yield for each file with enough texts its name, the past prompts of all other files, and its own to be asked."""
    for source in sorted({answer.source for answer in of.past}):
        asked = [answer for answer in (*of.past, *of.held_out) if answer.source == source]
        if len(asked) >= NUM_REQUESTS:
            yield source, Split([answer for answer in of.past if answer.source != source], asked)


def play(of: Split, options: argparse.Namespace, more: Mapping[str, object]) -> None:
    vectors: dict[tuple[int, ...], bytes] = {}
    if options.minilm:
        encoder, texts = _remembering_minilm(), {answer.prompt: answer.text for answer in (*of.past, *of.held_out)}
        prompts = list(texts)
        for at in range(0, len(prompts), 32):
            some = prompts[at : at + 32]
            found = encoder.vectors([Sketch(text=texts[prompt]) for prompt in some])
            vectors |= {prompt: vector.tobytes() for prompt, vector in zip(some, found, strict=True)}
    for line in simulated(of.past, of.held_out, vectors, range(options.seeds), options.regime):
        print_line({**line, **more})


if __name__ == "__main__":
    main()
