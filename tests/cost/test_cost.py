"""The cost model: increments equal the whole, no coefficient is negative, and recorded steps are predicted well."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core import AttentionPattern, Chunk, Decode, Fold, KvForm, Sampling, Scoring, StepPlan
from alignedserve.cost.fit import OnlineCost, Point, fit, spread
from alignedserve.cost.model import (
    Coefficients,
    CostModel,
    Kind,
    Link,
    Route,
    Shape,
    StepEstimate,
    Uncertainty,
    shape_of,
)
from alignedserve.cost.profile import MeasuredMemory, Profile, Subject, cached, fingerprint, load, save, store
from alignedserve.errors import ProfileError
from alignedserve.lab.devices import gpu_truth
from tests.conftest import examples
from tests.rare import thinned
from tests.samples import LIMITS

STEPS = Path(__file__).parent / "cost_steps.json"  # recorded by `python -m lab.benchmarks.cost --record`
MODELS = ("demo", "llama160m")
DRIFT = 1.6

TRUE = CostModel(
    {
        Kind.PREFILL: Coefficients(0.01, (1e-6, 2e-6, 4e-6, 1e-5), 1e-8, 1e-5, 2e-7),
        Kind.DECODE: Coefficients(0.01, (1e-5, 2e-5), decode=1e-5, prefix=1e-7, bubble=5e-8, remade=3e-7),
        Kind.MIXED: Coefficients(0.02, (2e-6, 4e-6), 2e-8, 1e-5, 2e-7, 2e-5, 2e-7, 1e-7, 3e-7),
    }
)

sizes = st.integers(0, 5000)
chunks = st.lists(st.tuples(st.integers(1, 600), sizes), max_size=5)
prefixes = st.lists(sizes, max_size=20)


# --- Putting a step together


@given(chunks, prefixes, st.lists(st.integers(1, 500), max_size=3), st.randoms())
def test_increments_equal_the_whole_in_any_order(
    chunks: list[tuple[int, int]], prefixes: list[int], hidden: list[int], chance: random.Random
) -> None:
    whole = Shape.build(chunks, prefixes, sum(hidden))
    parts: list[Any] = [*chunks, *prefixes, *(str(tokens) for tokens in hidden)]
    chance.shuffle(parts)
    estimate = StepEstimate(TRUE)
    for part in parts:
        expected = _add(estimate, part)
        assert estimate.seconds == expected
    assert estimate.shape == whole
    assert estimate.seconds == TRUE.seconds(whole)


def _add(estimate: StepEstimate, part: Any) -> float:
    """Return the predicted time of the step with the part, and then add the part."""
    match part:
        case (length, cached):
            said = estimate.with_chunk(length, cached)
            estimate.add_chunk(length, cached)
        case int(prefix):
            said = estimate.with_decode(prefix)
            estimate.add_decode(prefix)
        case text:
            said = estimate.with_remade(int(text))
            estimate.add_remade(int(text))
    return said


@given(chunks, prefixes)
def test_asking_what_if_changes_nothing(chunks: list[tuple[int, int]], prefixes: list[int]) -> None:
    shape = Shape.build(chunks, prefixes)
    estimate = StepEstimate(TRUE, shape)
    estimate.with_chunk(10, 20)
    estimate.with_decode(9999)
    estimate.with_remade(7)
    assert estimate.shape == shape


@given(chunks, prefixes, st.integers(1, 100), sizes)
def test_more_never_takes_less_within_a_kind(
    chunks: list[tuple[int, int]], prefixes: list[int], length: int, cached: int
) -> None:
    estimate = StepEstimate(TRUE, Shape.build(chunks, prefixes))
    if chunks:
        assert estimate.with_chunk(length, cached) >= estimate.seconds
    if prefixes:
        assert estimate.with_decode(max(prefixes)) >= estimate.seconds


@given(chunks.filter(bool), prefixes)
def test_a_step_takes_what_the_formula_says(chunks: list[tuple[int, int]], prefixes: list[int]) -> None:
    kind = TRUE.coefficients[Kind.MIXED if prefixes else Kind.PREFILL]
    tokens = sum(length for length, _ in chunks) + len(prefixes)
    bounds = [0, *(2**power for power in range(1, len(kind.token))), 10**9]
    pieces = zip(kind.token, bounds, bounds[1:], strict=False)
    expected = kind.fixed + sum(cost * max(0, min(tokens, end) - start) for cost, start, end in pieces)
    expected += kind.work * sum(length * (cached + length / 2) for length, cached in chunks)
    expected += sum(kind.chunk + kind.cached * cached for _, cached in chunks)
    expected += sum(kind.decode + kind.prefix * prefix for prefix in prefixes)
    if prefixes:
        expected += kind.bubble * len(prefixes) * (max(prefixes) - sum(prefixes) / len(prefixes))
    assert TRUE.seconds(Shape.build(chunks, prefixes)) == pytest.approx(expected)


def test_an_aligned_batch_has_no_bubble() -> None:
    aligned, uneven = Shape.build([], [500, 500]), Shape.build([], [100, 900])
    assert aligned.prefixes == uneven.prefixes
    assert TRUE.seconds(uneven) - TRUE.seconds(aligned) == pytest.approx(5e-8 * 2 * (900 - 500))


def test_an_empty_step_takes_nothing() -> None:
    assert StepEstimate(TRUE).seconds == 0
    assert TRUE.plan_seconds(StepPlan(0)) == 0


def test_the_shape_of_a_plan() -> None:
    chunk = Chunk("a", (1, 2, 3), 10, KvForm((0,)), None)
    decodes = tuple(Decode("b", 1, prefix, KvForm((1,)), Sampling(), 0) for prefix in (5, 8))
    plan = StepPlan(1, (chunk,), decodes)
    assert shape_of(plan) == Shape.build([(3, 10)], [5, 8]) == Shape(1, 3, 10, 69, 2, 13, 8)
    assert TRUE.plan_seconds(plan) == TRUE.seconds(shape_of(plan))


def test_a_prompt_token_takes_its_share_of_a_chunk() -> None:
    assert TRUE.prompt_token_s(512) == pytest.approx(TRUE.seconds(Shape.build([(512, 0)])) / 512)


def test_copies_take_their_bytes_over_the_bandwidth() -> None:
    link = Link(1e9, 1e-4)
    assert link.seconds(10**6) == pytest.approx(1.1e-3)
    assert link.seconds(0) == 0


# --- Fitting


def synthetic(count: int, seed: int, noise: float = 0.0) -> list[Point]:
    chance, points = random.Random(seed), []
    for _ in range(count):
        chunks = [(chance.randrange(1, 300), chance.choice((0, 700)))] * chance.choice((0, 1, 1, 2))
        prefixes = [chance.randrange(1, 2000) for _ in range(chance.choice((0, 1, 8, 40)))]
        shape = Shape.build(chunks, prefixes, chance.choice((0, 0, 100)) if prefixes else 0)
        if shape.tokens:
            points.append(Point(shape, TRUE.seconds(shape) * (1 + noise * chance.gauss(0, 1))))
    return points


@cache
def _fitted(noise: float) -> OnlineCost:
    return OnlineCost(synthetic(200, seed=0, noise=noise))


def learner(noise: float = 0.0) -> OnlineCost:
    """Return a cost model that was fitted to 200 steps, and learns; the fit is made once."""
    return _fitted(noise).copy()


def errors(model: CostModel, points: list[Point], kind: Kind | None = None) -> list[float]:
    of_kind = [point for point in points if kind in (None, point.shape.kind)]
    return [abs(model.seconds(point.shape) / point.seconds - 1) for point in of_kind]


def test_a_fit_tells_new_steps() -> None:
    model = learner(0.02).model
    assert median(errors(model, synthetic(200, seed=1))) < 0.03


def test_the_uncertainty_is_about_the_error_of_new_steps() -> None:
    model = learner(0.05).model
    new = synthetic(300, seed=1, noise=0.05)
    for kind in Kind:
        known, seen = model.uncertainty[kind], spread(errors(model, new, kind))
        assert 0.5 * seen.median < known.median < 2 * seen.median
        assert 0.5 * seen.p90 < known.p90 < 2 * seen.p90


def test_sizes_between_which_nothing_was_measured_lie_on_a_line() -> None:
    """Sizes beyond the measured lie on it too: a fit that knew 1 and 64 tokens alone could put a stair anywhere."""
    shapes = [Shape.build([(length, 0)]) for length in (16, 128, 1024)] * 4
    model = fit([Point(shape, 0.001 + 1e-5 * shape.tokens) for shape in shapes])
    for length in (32, 48, 256, 512, 700, 4096):
        assert model.seconds(Shape.build([(length, 0)])) == pytest.approx(0.001 + 1e-5 * length, rel=0.12)


def test_what_was_hardly_measured_is_told_by_all_the_rest() -> None:
    known = [point for point in synthetic(200, seed=0) if point.shape.kind is not Kind.MIXED]
    model = fit(known)
    assert model.seconds(Shape.build([(100, 0)], [500])) > 0.01


def test_hidden_projection_comes_from_its_own_measurement() -> None:
    model = fit(
        [Point(shape, 0.01) for shape in [Shape.build([], [10 * n]) for n in range(1, 20)]], remade_token_s=1e-6
    )
    base = Shape.build([], [50])
    assert model.seconds(base._replace(remade=100)) == pytest.approx(model.seconds(base) + 1e-4)
    assert model.remade_token_s == pytest.approx(1e-6)


def all_coefficients(model: CostModel) -> list[float]:
    return [
        number
        for coefficients in model.coefficients.values()
        for number in (
            coefficients.fixed,
            *coefficients.token,
            coefficients.work,
            coefficients.chunk,
            coefficients.cached,
            coefficients.decode,
            coefficients.prefix,
            coefficients.bubble,
        )
    ]


seconds = st.floats(1e-5, 10)
steps = st.lists(st.tuples(chunks, prefixes, seconds), max_size=12)


@settings(max_examples=examples(15), deadline=None)
@given(steps, steps)
def test_no_coefficient_is_ever_negative(
    profiled: list[tuple[list[tuple[int, int]], list[int], float]],
    learned: list[tuple[list[tuple[int, int]], list[int], float]],
) -> None:
    points = [Point(Shape.build(chunks, prefixes), took) for chunks, prefixes, took in profiled if chunks or prefixes]
    online = OnlineCost(points)
    for chunks, prefixes, took in learned:
        online.learn(Shape.build(chunks, prefixes), took)
        assert min(all_coefficients(online.model)) >= 0
        assert online.model.seconds(Shape.build([(1, 0)], [1])) < 1e6


# --- Learning


def test_it_begins_as_slow_as_it_was_told() -> None:
    known = dict.fromkeys(Kind, Uncertainty())
    slow, shape = OnlineCost(synthetic(200, seed=0), slowdown=3.0, known=known), Shape.build([], [300] * 8)
    assert slow.slowdown == pytest.approx(3.0)
    assert slow.model.seconds(shape) == pytest.approx(3 * learner().model.seconds(shape))


def test_a_snapshot_does_not_change() -> None:
    online = learner()
    before, shape = online.model, Shape.build([], [100])
    said = before.seconds(shape)
    for _ in range(2):
        online.learn(shape, 1.0)
    assert online.model is not before
    assert before.seconds(shape) == said < online.model.seconds(shape)


def test_an_outlier_moves_next_to_nothing() -> None:
    online = learner()
    shape = Shape.build([], [300] * 8)
    before = online.model.seconds(shape)
    online.learn(shape, 50 * before)
    assert online.model.seconds(shape) == pytest.approx(before, rel=0.05)


def test_a_worker_that_ran_a_single_size_for_long_still_knows_the_other_sizes() -> None:
    online = learner(0.02)
    small, large = Shape.build([], [100] * 2), Shape.build([], [1500] * 40)
    for _ in range(1000):
        online.learn(small, 1.1 * TRUE.seconds(small))
    assert online.model.seconds(small) == pytest.approx(1.1 * TRUE.seconds(small), rel=0.03)
    assert online.model.seconds(large) == pytest.approx(TRUE.seconds(large), rel=0.15)


def test_a_kind_that_slows_down_is_a_warning_for_the_others() -> None:
    online = learner()
    decode, prefill = Shape.build([], [300] * 8), Shape.build([(200, 0)])
    before = online.model.seconds(prefill)
    for _ in range(100):
        online.learn(decode, 2 * TRUE.seconds(decode))
    assert 1.2 * before < online.model.seconds(prefill) < 2 * before


def test_a_spell_of_slow_memory_is_followed_within_a_few_steps_and_soon_forgotten() -> None:
    """What steps read takes twice as long meanwhile: a step of few tokens nearly so, one of many hardly longer."""
    few, many = Shape.build([(8, 0)], [300] * 8), Shape.build([(4000, 0)], [300] * 8)
    slowed = CostModel({kind: one.scaled(2.0, 1.0) for kind, one in TRUE.coefficients.items()})
    online = learner(0.02)
    for truth in (TRUE, slowed, TRUE):
        for _ in range(6):
            online.learn(few, truth.seconds(few))
            online.learn(many, truth.seconds(many))
        assert online.model.seconds(few) == pytest.approx(truth.seconds(few), rel=0.1)
        assert online.model.seconds(many) == pytest.approx(truth.seconds(many), rel=0.1)
    assert slowed.seconds(few) > 1.8 * TRUE.seconds(few)
    assert slowed.seconds(many) < 1.4 * TRUE.seconds(many)


def test_the_uncertainty_follows_the_errors() -> None:
    online = learner()
    chance, shape = random.Random(1), Shape.build([], [300] * 8)
    for _ in range(600):
        online.learn(shape, TRUE.seconds(shape) * (1 + 0.2 * chance.uniform(-1, 1)))
    known = online.model.uncertainty[Kind.DECODE]
    assert 0.05 < known.median < 0.16
    assert 0.14 < known.p90 < 0.26


def test_how_far_the_longest_steps_go_is_measured() -> None:
    """There are a few stalls, of which the usual error of steps says nothing."""
    online, shape, chance = learner(), Shape.build([(64, 0)], [300] * 8), random.Random(2)
    steps_s = TRUE.seconds(shape)
    for number in range(1000):
        online.learn(
            shape, steps_s * (1 + 0.01 * chance.uniform(-1, 1) + (chance.uniform(0.4, 0.8) if not number % 50 else 0))
        )
    known = online.model.uncertainty[Kind.MIXED]
    assert known.p90 < 0.2
    assert 0.75 < known.beyond(steps_s) < 2.2
    for _ in range(2000):
        online.learn(shape, steps_s)
    assert online.model.uncertainty[Kind.MIXED].beyond(steps_s) < 0.2


def test_short_steps_do_not_say_how_far_long_steps_go() -> None:
    online = learner()
    short, long = Shape.build([(8, 0)], [50]), Shape.build([(4000, 0)], [300] * 8)
    for number in range(2000):
        online.learn(long, TRUE.seconds(long))
        online.learn(short, TRUE.seconds(short) * (2.0 if not number % 50 else 1.0))
    known = online.model.uncertainty[Kind.MIXED]
    assert known.beyond(TRUE.seconds(long)) < 0.2
    assert known.beyond(TRUE.seconds(short)) > 0.9


def test_a_length_that_no_step_has_any_more_is_not_held_to_old_delays() -> None:
    """Memory is mapped in the first seconds of a load: steps of one length took twice as long then, and would never be
    tried again."""
    online, short, long = learner(), Shape.build([(8, 0)], [50]), Shape.build([(512, 0)], [300])
    for step in range(100):
        online.learn(long, (2.0 if step % 5 == 0 else 1.0) * TRUE.seconds(long))
    long_s = TRUE.seconds(long)
    assert online.model.uncertainty[Kind.MIXED].beyond(long_s) > 0.8
    for _ in range(1024):
        online.learn(short, TRUE.seconds(short))
    assert online.model.uncertainty[Kind.MIXED].beyond(long_s) < 0.2


def test_delays_of_short_steps_are_a_smaller_share_of_steps_that_have_not_run() -> None:
    online, short = learner(), Shape.build([(8, 0)], [50])
    for number in range(200):
        online.learn(short, TRUE.seconds(short) * (2.0 if not number % 50 else 1.0))
    known, short_s = online.model.uncertainty[Kind.MIXED], TRUE.seconds(short)
    assert known.beyond(16 * short_s) == pytest.approx(known.beyond(short_s) / 4)


def test_before_enough_steps_the_profile_says_how_far_they_go() -> None:
    online, shape = learner(0.05), Shape.build([(64, 0)], [300] * 8)
    online.learn(shape, TRUE.seconds(shape))
    known = online.model.uncertainty[Kind.MIXED]
    assert not known.tails
    assert known.beyond(1.0) > 2 * known.p90


def test_learning_starts_without_a_profile_too() -> None:
    online = OnlineCost([])
    for point in synthetic(600, seed=3):
        online.learn(point.shape, point.seconds)
    assert median(errors(online.model, synthetic(100, seed=4))) < 0.25
    online.learn(Shape(), 1.0)  # an empty step teaches nothing
    online.learn(Shape.build([], [5]), 0.0)


# --- Recorded steps of the CPU engine


@cache
def recorded(model: str) -> dict[str, list[Point]]:
    tree = json.loads(STEPS.read_text())["models"][model]
    return {name: [Point(Shape(*row[:-1]), row[-1]) for row in rows] for name, rows in tree.items()}


@cache
def of_recorded(model: str) -> OnlineCost:
    return OnlineCost(recorded(model)["profile"])


@pytest.mark.parametrize("kind", [Kind.PREFILL, Kind.DECODE])
@pytest.mark.parametrize("model", MODELS)
def test_recorded_steps_that_were_held_out(model: str, kind: Kind) -> None:
    off = spread(errors(of_recorded(model).model, recorded(model)["held_out"], kind))
    assert off.median <= 0.10
    assert off.p90 <= 0.25


def test_recorded_steps_that_become_slower() -> None:
    """The median error is taken 200 to 300 steps after all times grow by 1.6."""
    steps = recorded("demo")
    online, off = of_recorded("demo").copy(), list[float]()
    change = len(steps["served"]) - 300
    for at, step in enumerate(steps["served"]):
        took = step.seconds * (DRIFT if at >= change else 1)
        off.append(abs(online.model.seconds(step.shape) / took - 1))
        online.learn(step.shape, took)
    assert median(off[change + 200 :]) < 0.15
    assert max(off[change : change + 2]) > 0.25  # there was a change to learn


# --- GPUs


@pytest.mark.parametrize("name", thinned(gpu_truth.names(), usual=2))
def test_composed_gpu_steps_that_were_held_out(name: str) -> None:
    truth = gpu_truth.load(name)

    def points(chunks: list[int], cached: list[int], counts: list[int], prefixes: list[int]) -> list[Point]:
        parts = [([(chunk, before)], [0] * 0) for chunk in chunks for before in cached]
        parts += [([], [prefix] * count) for count in counts for prefix in prefixes]
        return [Point(Shape.build(*part), truth.seconds_of(*part)) for part in parts]

    model = fit(points([16, 64, 256, 1024], [0, 64, 1024, 4096], [1, 4, 16, 64, 256], [16, 256, 1024, 4096]))
    new = points([24, 100, 400, 700, 2048], [0, 300, 2000, 9000], [2, 10, 30, 100], [100, 700, 2000, 9000])
    for kind in (Kind.PREFILL, Kind.DECODE):
        assert median(errors(model, new, kind)) <= 0.10


# --- Files

SUBJECT = Subject("abc", "some cpu, 1 thread", "bfloat16", 1, "0.1.0", "C++, amx")
LINKS = {Route.ARENA_TO_DEVICE: Link(1e9, 1e-5), Route.DEVICE_TO_ARENA: Link(2e9)}


MEMORY = MeasuredMemory(LIMITS, kv_bytes=5120)


@cache
def profile() -> Profile:
    return Profile.fitted(SUBJECT, MEMORY, tuple(synthetic(60, seed=0)), 1e-7, LINKS)


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(profile(), path)
    assert load(path) == profile()
    assert profile().online().model == profile().model
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    "changes", [{"reach": 9}, {"fold": Fold(AttentionPattern(9), 3)}, {"fold": Fold(AttentionPattern(stretch=8), 2)}]
)
def test_what_a_worker_gives_back_of_its_memory_is_known_to_its_profile(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    measured = replace(profile(), memory=replace(MEMORY, limits=replace(LIMITS, **changes)))
    save(measured, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == measured


def test_the_cache_holds_what_was_stored(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    assert cached(folder, SUBJECT) is None
    store(folder, profile())
    assert cached(folder, SUBJECT) == profile()
    assert cached(folder, replace(SUBJECT, device="another cpu")) is None
    assert cached(folder, replace(SUBJECT, kernels="C++, avx2")) is None


def test_a_foreign_or_broken_profile_in_the_cache_counts_as_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    another = Subject("xyz", "some cpu, 1 thread", "bfloat16", 1, "0.1.0", "C++, amx")
    save(profile(), tmp_path / another.file_name)
    (tmp_path / SUBJECT.file_name).write_text('{"format": 1}')
    assert cached(tmp_path, another) is None
    assert cached(tmp_path, SUBJECT) is None
    assert [record.message.endswith("it is measured again") for record in caplog.records] == [True, True]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store(tmp_path / "file", profile())
    assert "cannot be saved" in caplog.text


def _broken(change: Any) -> str:
    path_tree = json.loads(_text())
    change(path_tree)
    return json.dumps(path_tree)


@cache
def _text() -> str:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        save(profile(), path)
        return path.read_text()


BROKEN = {
    "no JSON": lambda: "{",
    "no object": lambda: "[]",
    "another format": lambda: _broken(lambda tree: tree.update(format=1)),
    "no points": lambda: _broken(lambda tree: tree.pop("points")),
    "a point of text": lambda: _broken(lambda tree: tree["points"].append(["a"] * 9)),
    "a point too short": lambda: _broken(lambda tree: tree["points"].append([1, 2, 0.5])),
    "a point in no time": lambda: _broken(lambda tree: tree["points"][0].__setitem__(-1, 0)),
    "a negative coefficient": lambda: _broken(lambda tree: tree["coefficients"]["decode"].update(fixed=-1)),
    "not a number": lambda: _broken(lambda tree: tree["coefficients"]["decode"].update(fixed=float("nan"))),
    "an unknown coefficient": lambda: _broken(lambda tree: tree["coefficients"]["decode"].update(more=1)),
    "no tokens": lambda: _broken(lambda tree: tree["coefficients"]["mixed"].update(token=[])),
    "an unknown route": lambda: _broken(lambda tree: tree["links"].update(pigeon={"bandwidth": 1})),
    "a subject without a model": lambda: _broken(lambda tree: tree["subject"].pop("model")),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_told_in_one_line(tmp_path: Path, text: Any) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text())
    with pytest.raises(ProfileError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="cannot be written"):
        save(profile(), tmp_path / "none" / "profile.json")


def test_the_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    bare = fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_text("12")
    weighted = fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert len({bare, weighted, fingerprint(tmp_path)}) == 3


# --- What a part of a step is charged with


def _plan(chunks: list[tuple[int, int]], prefixes: list[int]) -> StepPlan:
    """Return a step with these chunks, as (length, cached), and decodes with these prefixes."""
    names = iter(range(len(chunks) + len(prefixes)))
    run = [Chunk(f"r{next(names)}", (1,) * length, cached, KvForm(), None) for length, cached in chunks]
    on = [Decode(f"r{next(names)}", 1, prefix, KvForm(), Sampling(), 0) for prefix in prefixes]
    return StepPlan(1, tuple(run), tuple(on))


def shares(model: CostModel, plan: StepPlan) -> list[float]:
    charges, in_all = model.charges(plan)
    return [charge / in_all for charge in charges]


@given(chunks, prefixes)
def test_the_parts_of_a_step_are_charged_with_all_of_it(chunks: list[tuple[int, int]], prefixes: list[int]) -> None:
    if not chunks and not prefixes:
        return
    charged = shares(TRUE, _plan(chunks, prefixes))
    assert len(charged) == len(chunks) + len(prefixes)
    assert sum(charged) == pytest.approx(1.0)
    assert min(charged) > 0


def test_a_part_is_charged_with_what_it_adds_and_its_share_of_what_a_step_takes_in_any_case() -> None:
    coefficients = Coefficients(fixed=4e-3, token=(0.0,), work=0.0, chunk=5e-3, decode=0.5e-3)
    model = CostModel(dict.fromkeys(Kind, coefficients))
    assert shares(model, _plan([(7, 0)], [3, 90])) == pytest.approx([0.6333, 0.1833, 0.1833], abs=1e-3)


@given(st.integers(1, 500), st.integers(1, 500), sizes, sizes)
def test_who_does_more_is_charged_with_more(length: int, more: int, prefix: int, further: int) -> None:
    small, large = shares(TRUE, _plan([(length, 0), (length + more, 0)], []))
    assert small < large
    near, far = shares(TRUE, _plan([], [prefix, prefix + further]))
    assert near <= far


def test_a_scored_chunk_is_charged_for_its_logits_too() -> None:
    plain, other = (Chunk(name, (1,) * 50, 0, KvForm(), None) for name in "ab")
    scored = replace(plain, scoring=Scoring((1,) * 50, 3))
    model = CostModel(dict.fromkeys(Kind, Coefficients(token=(1e-3,))))
    assert shares(model, StepPlan(1, (scored, other))) == pytest.approx([2 / 3, 1 / 3])
    assert model.plan_seconds(StepPlan(1, (scored, other))) == pytest.approx(0.15)


def test_without_a_profile_all_parts_are_charged_alike() -> None:
    model = CostModel(dict.fromkeys(Kind, Coefficients()))
    assert shares(model, _plan([(7, 0)], [3, 90])) == pytest.approx([1 / 3] * 3)
