"""Tests of the setting of adapters (LoRA): from flags, from a file, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from alignedserve.architectures.families.lora import read_lora
from alignedserve.architectures.families.model_config import read_config
from alignedserve.cli.serving import add_serve, config_of
from alignedserve.config.config import Config, dump, load, parse
from alignedserve.errors import AdapterError, ConfigError
from alignedserve.sizing.adapters import adapter_room, adapter_roots, as_named, check_names, first_adapters
from tests.adapters import make_adapter
from tests.models import gqa

MIB = 1 << 20


def from_command(*flags: str) -> Config:
    parser = argparse.ArgumentParser()
    add_serve(parser)
    return config_of(parser.parse_args(flags))


def test_the_flag_may_be_given_again_and_folders_become_absolute() -> None:
    config = from_command("demo", "--lora", "sql=adapters/sql", "--lora", "law=/law")
    assert config.lora is not None
    assert config.lora.folders == (("sql", str(Path.cwd() / "adapters/sql")), ("law", "/law"))
    assert parse(dump(config)) == config, "parts are told the same"


def test_a_folders_name_may_have_commas() -> None:
    config = from_command("demo", "--lora", "sql=/of/v1,2,final", "--lora", "law=/a, b/c")
    assert config.lora is not None
    assert config.lora.folders == (("sql", "/of/v1,2,final"), ("law", "/a, b/c"))
    assert parse(dump(config)) == config, "parts are told the same"


def test_a_folder_that_reads_like_two_adapters_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("lora:\n  sql: /rank,alpha=3\n")
    with pytest.raises(ConfigError, match="'/rank,alpha=3' has a comma where a name could begin"):
        load({}, {}, file)


def test_a_file_has_them_by_name(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("lora:\n  sql: /sql\n  law: /law\n")
    config = load({}, {}, file)
    assert config.lora is not None
    assert config.lora.folders == (("sql", "/sql"), ("law", "/law"))


@pytest.mark.parametrize("text", ["sql", "=x", "sql=", "sql=/a,,law=/b"])
def test_what_is_no_name_and_folder_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=FOLDER"):
        load({"lora": text}, {}, None)


def test_a_name_that_stands_for_two_is_refused() -> None:
    with pytest.raises(ConfigError, match="'sql' is given twice"):
        load({"lora": "sql=/a,sql=/b"}, {}, None)
    with pytest.raises(ConfigError, match="the model itself is called 'demo'"):
        check_names(load({"model": "demo", "lora": "demo=/a"}, {}, None))


def test_memory_is_planned_for_them(tmp_path: Path) -> None:
    folder = gqa(tmp_path / "model")
    adapter = make_adapter(folder, tmp_path / "sql", seed=0, rank=256)
    model = read_config(folder)
    taken = read_lora(adapter, model).num_bytes(4)
    assert taken > MIB
    assert adapter_room(load({}, {}, None), model, "float32") == 0
    config = load({"lora": f"sql={adapter}"}, {}, None)
    assert adapter_room(config, model, "float32") == 256 * MIB
    assert adapter_room(load({"engine.adapters_mb": 7}, {}, None), model, "float32") == 7 * MIB
    too_little = load({"lora": f"sql={adapter}", "engine.adapters_mb": 1}, {}, None)
    with pytest.raises(ConfigError, match="is too little for the adapters of --lora"):
        adapter_room(too_little, model, "float32")
    (named,) = as_named(first_adapters(config, model))
    assert (named.name, named.folder) == ("sql", str(adapter))
    with pytest.raises(AdapterError, match="is not a folder"):
        adapter_room(load({"lora": "sql=/nowhere"}, {}, None), model, "float32")


def test_clients_load_from_beside_those_of_the_settings_or_from_the_folder_that_is_named(tmp_path: Path) -> None:
    def roots(**given: object) -> tuple[Path, ...]:
        return adapter_roots(load(given, {}, None))

    assert roots() == ()
    assert roots(lora="a=/one/a,b=/one/b,c=/two/c") == (Path("/one"), Path("/two"))
    assert roots(lora="a=/a") == ()
    assert roots(**{"lora": "a=/one/a", "engine.adapters_root": str(tmp_path)}) == (tmp_path,)
