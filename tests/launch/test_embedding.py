"""An embedding model beside the served one: its parts, their settings, and what orders make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.config.choices import ModelNames
from alignedserve.config.config import Config, load, parse
from alignedserve.core import OWNERS, Role
from alignedserve.errors import ConfigError, MemoryTooSmall
from alignedserve.launch import plan as planning
from alignedserve.launch.plan import check_open_files, embedding_config, plan
from alignedserve.protocol.messages import ROUTER
from alignedserve.shell.control import LauncherOrder
from alignedserve.shell.part import PartSpec
from alignedserve.signs import ExitCode
from alignedserve.sizing.memory import FreeMemory
from tests.launch.keepers import ScriptedDeployment
from tests.launch.test_restarting import SPLIT, Commanded, run
from tests.pooled_folders import encoder_config, encoder_folder

__all__ = ["run"]
OF_EMBED = {"router-embed": Role.ROUTER, "decode-embed": Role.DECODE}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder_folder(tmp_path_factory.mktemp("encoder"), encoder_config("bert"))


def config_of(encoder: Path, memory: Path, **more: object) -> Config:
    flags = {"model": "demo", "embed": str(encoder), "engine.device": "cpu", "kvpool.directory": str(memory)}
    return load({**flags, **{name.replace("__", "."): value for name, value in more.items()}}, {}, None)


def test_its_parts_are_a_deployment_of_their_own(encoder: Path, tmp_path: Path) -> None:
    planned = plan(config_of(encoder, tmp_path, engine__max_model_len=100, slo__ttft_ms=700.0))
    beside = {spec.name: spec for spec in planned.specs if spec.of_embed}
    others = [spec for spec in planned.specs if not spec.of_embed]
    assert {name: spec.role for name, spec in beside.items()} == OF_EMBED
    (router,), (deployment,) = ({getattr(spec, name) for spec in beside.values()} for name in ("router", "deployment"))
    assert router not in {spec.router for spec in others}
    assert deployment.startswith(others[0].deployment)
    assert deployment != others[0].deployment
    assert beside["router-embed"].member == ROUTER == others[0].member
    settings = parse(beside["decode-embed"].config)
    assert (settings.model, settings.model_names) == (str(encoder), (encoder.name,))
    assert (settings.embed, settings.jobs.store, settings.topology.colocated) == (None, "off", True)
    assert settings.engine.max_model_len == 120, "sizes of the served model are not its own"
    assert settings.slo.ttft_ms == 700.0
    assert planned.sizes[-1].startswith(f"embed: {encoder.name} on the CPU: 1 MB of weights")
    for spec in others:
        assert (spec.embed is not None) == (spec.role in OWNERS)
        if spec.embed is not None:
            at = spec.on_side(spec.embed)
            assert (at.router, at.deployment, at.name) == (router, deployment, spec.name)
            assert PartSpec.from_json(spec.to_json()) == spec


def test_what_it_claims_is_not_there_for_the_first_model(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[FreeMemory]()
    here = FreeMemory.here

    def noted(directory: Path) -> FreeMemory:
        seen.append(here(directory))
        return seen[-1]

    monkeypatch.setattr(planning.FreeMemory, "here", noted)
    demand = planning.demand
    monkeypatch.setattr(planning, "demand", lambda *given: replace(demand(*given), weights=1 << 30))
    plan(config_of(encoder, tmp_path))
    before, after = (found.available for found in seen)
    assert before is not None
    assert after is not None
    assert (1 << 30) * 0.8 < before - after < (1 << 30) * 1.2


def test_it_may_have_a_quarter_of_the_memory_or_what_it_needs(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, with_sizes = list[int | None](), planning.with_sizes

    def sized(config: Config, model: object, folder: Path, free: FreeMemory) -> Config:
        given.append(free.available)
        if len(given) == 1:
            raise MemoryTooSmall("too small")
        return with_sizes(config, model, folder, free)  # pyrefly: ignore[bad-argument-type]

    monkeypatch.setattr(planning, "with_sizes", sized)
    plan(config_of(encoder, tmp_path))
    first, second, _ = given
    assert first is not None
    assert second is not None
    assert first == pytest.approx(second / 4, rel=0.01)


def test_two_models_of_one_name_and_ray_are_refused(encoder: Path, tmp_path: Path) -> None:
    config = replace(config_of(encoder, tmp_path), served_model_name=ModelNames(("minilm",)), embed="minilm")
    with pytest.raises(ConfigError, match="--embed minilm is the model that is served"):
        embedding_config(config)
    with pytest.raises(ConfigError, match="cannot be used with launcher ray"):
        config_of(encoder, tmp_path, launcher="ray")
    check_open_files(config)


# --- What the launcher does

BOTH = replace(SPLIT, embed="minilm")


@pytest.mark.usefixtures("own_door")
def test_its_parts_are_restarted_in_place(run: Callable[[Commanded], None]) -> None:
    run(kept := Commanded(LauncherOrder(restart=True), config=BOTH))
    (answer,) = kept.answers
    assert {f"{name} ends, and starts again" for name in OF_EMBED} < set(answer)
    assert "decode-1 starts, in place of decode-0" in answer
    assert kept.there() >= {"router-embed", "decode-embed", "decode-1"}
    assert kept.lives("decode-embed") == kept.lives("router-embed") == [1, 2]


@pytest.mark.usefixtures("own_door")
def test_its_worker_is_none_of_those_that_scale(run: Callable[[Commanded], None]) -> None:
    run(kept := Commanded(LauncherOrder(decode=2), LauncherOrder(restart=True), LauncherOrder(decode=3), config=BOTH))
    assert kept.answers[0] == ["decode-1 starts"]
    workers = [name for name in kept.there() if name.startswith("decode")]
    assert len(workers) == 4
    assert [name for name in workers if kept.spec(name).of_embed] == ["decode-embed"]


@pytest.mark.usefixtures("own_door")
@pytest.mark.parametrize("part", [*OF_EMBED, "decode-0"])
def test_no_worker_stands_in_for_one_of_the_other_model(part: str) -> None:
    kept = ScriptedDeployment(BOTH, lambda kept, spec: kept.die(spec) if spec.name == part else None)
    assert kept.run() == ExitCode.BROKEN
    assert kept.lives(part) == [1, 2, 3]
