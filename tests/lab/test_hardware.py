"""The hardware that simulated workers are made of."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, median

import pytest

from alignedserve.core import NO_KV, Decode, Sampling, StepPlan
from alignedserve.cost.model import Coefficients, CostModel, Kind, Route, Shape, Uncertainty, shape_of
from alignedserve.lab.benchmarks.isolation import HoggedTruth
from alignedserve.lab.devices.gpu_truth import names
from alignedserve.lab.devices.hardware import ProfileTruth, from_gpu
from alignedserve.protocol.commands import CopyIn
from alignedserve.protocol.form_orders import CompressPage
from alignedserve.scheduling.form_rules import Compression
from alignedserve.scheduling.policy import Policy

KNOWN = CostModel({kind: Coefficients(fixed=1e-3, token=(1e-4,)) for kind in Kind}, dict.fromkeys(Kind, Uncertainty()))
OFF = Uncertainty(median=0.04, p90=0.12)


def decodes(number: int, count: int = 3) -> StepPlan:
    each = [Decode(f"r{at}", 1, 10 + at, NO_KV, Sampling(), 1) for at in range(count)]
    return StepPlan(number, decodes=tuple(each))


def off_by(truth: ProfileTruth, count: int = 4000) -> list[float]:
    plans = [decodes(number) for number in range(count)]
    return [truth.seconds(plan) / KNOWN.plan_seconds(plan) - 1 for plan in plans]


class TestRecordedProfiles:
    TRUTH = ProfileTruth(CostModel(KNOWN.coefficients, dict.fromkeys(Kind, OFF)), seed=1)

    def test_steps_are_off_by_as_much_as_the_measured_steps_were(self) -> None:
        found = off_by(self.TRUTH)
        sizes = sorted(map(abs, found))
        assert median(sizes) == pytest.approx(OFF.median, rel=0.1)
        assert sizes[len(sizes) * 9 // 10] == pytest.approx(OFF.p90, rel=0.1)
        assert mean(found) == pytest.approx(0.0, abs=0.005)

    def test_the_same_seed_is_the_same_device(self) -> None:
        again = ProfileTruth(CostModel(KNOWN.coefficients, dict.fromkeys(Kind, OFF)), seed=1)
        reseeded = ProfileTruth(CostModel(KNOWN.coefficients, dict.fromkeys(Kind, OFF)), seed=2)
        assert off_by(again, 50) == off_by(self.TRUTH, 50) != off_by(reseeded, 50)

    @pytest.mark.parametrize("known", [Uncertainty(), Uncertainty(1.0, 1.0)], ids=["exact", "never measured"])
    def test_where_nothing_is_known_of_that_they_are_as_the_model_says(self, known: Uncertainty) -> None:
        truth = ProfileTruth(CostModel(KNOWN.coefficients, dict.fromkeys(Kind, known)))
        assert off_by(truth, 20) == [0.0] * 20

    def test_trials_are_not_off(self) -> None:
        shape = shape_of(decodes(1))
        assert self.TRUTH.seconds_of([], [10, 11, 12]) == KNOWN.seconds(shape)
        assert self.TRUTH.seconds_of([(5, 0)], []) == KNOWN.seconds(Shape.build([(5, 0)]))


@pytest.mark.parametrize("name", names())
def test_a_gpu_has_room_for_kv_and_a_link_for_every_route(name: str) -> None:
    device = from_gpu(name)
    assert 10_000 < device.kv_tokens < 2_000_000
    assert set(device.links) == set(Route)
    assert device.copies_beside is (device.gpus == 1)


class TestKinds:
    PLAIN = from_gpu(names()[0])
    DEVICE = PLAIN.divided(800, Policy(compression=Compression.AUTO))

    def copied(self, pages: tuple[int, ...], tokens: int) -> float:
        return self.DEVICE.work(CopyIn(1, "pool-0.1", pages, (), tuple(range(tokens))))

    def test_only_a_pool_that_compresses_is_cut_into_extents(self) -> None:
        assert self.PLAIN.divided(800, Policy()).extents is None
        assert self.DEVICE.extents is not None
        assert (self.DEVICE.extents.count, self.DEVICE.extents.kv, self.DEVICE.extents.kv_int8) == (100, 8, 15)

    def test_int8_pages_come_in_about_half_the_time(self) -> None:
        extents, size = self.DEVICE.extents, self.DEVICE.page_size
        assert extents is not None
        int8 = extents.num_pages(extents.first_kind)
        kinds = ((0, 1, 2, 3), (int8, int8 + 1, 2, 3), (int8, int8 + 1, int8 + 2, int8 + 3))
        kv, mixed, compressed = (self.copied(pages, 4 * size) for pages in kinds)
        assert compressed == pytest.approx(8 / 15 * kv, rel=0.02)
        assert mixed == pytest.approx((kv + compressed) / 2, rel=0.02)

    def test_to_compress_takes_time(self) -> None:
        assert self.DEVICE.work(CompressPage(1, "pool-0.1", 0, 900)) > self.copied((0,), self.DEVICE.page_size)


class TestBesideAHog:
    def test_reading_takes_twice_as_long_in_spells_and_only_in_spells(self) -> None:
        now = [0.0]
        reads = CostModel({kind: Coefficients(fixed=1e-3) for kind in Kind})
        truth = HoggedTruth(reads, seed=3, now=lambda: now[0])
        took = []
        for second in range(400):
            now[0] = float(second)
            took.append(truth.seconds(decodes(second)))
        assert set(took) == {1e-3, 2e-3}
        assert 100 < took.count(2e-3) < 300
        changes = sum(before != after for before, after in pairwise(took))
        assert 20 < changes < 200, "spells last some seconds"
