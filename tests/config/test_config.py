"""Tests that four sources give one configuration, and that each error names its place and its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.config.choices import Dtype, Graphs, Launcher, LogFormat, LogLevel, ModelNames, TransportName
from alignedserve.config.config import Config, dump, load, parse, settings
from alignedserve.config.sections import EngineConfig, LogConfig, PoolConfig, ServerConfig, WireConfig
from alignedserve.config.topology import Topology
from alignedserve.errors import ConfigError
from alignedserve.scheduling.form_rules import Compression


def _file(folder: Path, text: str) -> Path:
    path = folder / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _refusal(flags: dict[str, Any] | None = None, env: dict[str, str] | None = None, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        load(flags or {}, env or {}, path)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_nothing_given_is_the_usual_model_on_loopback() -> None:
    config = load({}, {}, None)
    assert config == Config()
    assert (config.model, config.server.host, config.server.port) == ("auto", "127.0.0.1", 8000)
    assert config.topology.colocated


def test_a_flag_outweighs_a_variable_which_outweighs_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "server: {port: 1, host: file, drain_s: 9}\nlog: {level: error}\n")
    env = {"ALIGNEDSERVE_SERVER_PORT": "2", "ALIGNEDSERVE_SERVER_HOST": "variable", "HOME": "/"}
    config = load({"server.port": "3"}, env, path)
    assert (config.server.port, config.server.host, config.server.drain_s) == (3, "variable", 9.0)
    assert config.log.level is LogLevel.ERROR
    assert config.server.body_limit_mb == ServerConfig().body_limit_mb


def test_text_is_read_as_the_setting_s_type() -> None:
    env = {
        "ALIGNEDSERVE_MODEL": "org/name",
        "ALIGNEDSERVE_TOPOLOGY": "2+3",
        "ALIGNEDSERVE_ENGINE_DTYPE": "bfloat16",
        "ALIGNEDSERVE_ENGINE_MAX_MODEL_LEN": "4096",
        "ALIGNEDSERVE_KVPOOL_VERIFY_PAGES": "true",
        "ALIGNEDSERVE_WIRE_DEATH_S": "5",
    }
    config = load({"launcher": "ray"}, env, None)
    assert (config.model, config.topology, config.launcher) == ("org/name", Topology(2, 3), Launcher.RAY)
    assert (config.engine.dtype, config.engine.max_model_len) == (Dtype.BFLOAT16, 4096)
    assert (config.kvpool.verify_pages, config.wire.death_s) == (True, 5.0)


def test_auto_leaves_a_number_to_its_default(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("kvpool: {memory_mb: auto}\nengine: {threads: 3}\n")
    config = load({"engine.threads": "auto"}, {"ALIGNEDSERVE_KVPOOL_VERIFY_PAGES": "auto"}, tmp_path / "config.yaml")
    assert (config.kvpool.memory_mb, config.engine.threads, config.kvpool.verify_pages) == (None, None, None)
    assert "must be an integer" in _refusal({"server.port": "auto"})


def test_flags_may_be_typed_already() -> None:
    config = load({"server.port": 9, "topology": Topology(1, 1), "kvpool.verify_pages": True}, {}, None)
    assert (config.server.port, str(config.topology), config.kvpool.verify_pages) == (9, "1+1", True)


def test_what_a_cpu_copies_is_verified_and_what_is_asked_for() -> None:
    gpu = {"engine.device": "cuda"}
    assert Config().verifies_pages
    assert not load(gpu, {}, None).verifies_pages
    assert not load({"kvpool.verify_pages": False}, {}, None).verifies_pages
    asked = load({**gpu, "kvpool.verify_pages": True}, {}, None)
    assert asked.verifies_pages
    both = (TransportName.COLLECTIVE, TransportName.IPC)
    assert [Config().verifies_transfers(name) for name in both] == [True, False], "the source would read all for it"
    assert [asked.verifies_transfers(name) for name in both] == [True, True]


@pytest.mark.parametrize("text", ["", "# nothing\n", "server:\n", "engine: {max_model_len: null}\n"])
def test_a_file_may_leave_everything_out(tmp_path: Path, text: str) -> None:
    assert load({}, {}, _file(tmp_path, text)) == Config()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("server: {prot: 1}", "server.prot is not a setting: did you mean server.port?"),
        ("sever: {port: 1}", "sever is not a setting: did you mean server?"),
        ("port: 1", "port is not a setting: did you mean server.port?"),
        ("zzzz: 1", "zzzz is not a setting"),
        ("1: 1", "1 is not a setting"),
        ("server.port: 1", "'server.port' is not a setting: a file names them by section, without dots"),
        ("log: {}\nlog: {}", "log is given twice, again in line 2"),
        ("log:\n  level: info\n  level: error", "level is given twice, again in line 3"),
        ("server: {port: '8000'}", "server.port must be an integer, not the text '8000'"),
        ("server: {port: true}", "server.port must be an integer, not true"),
        ("server: {port: 80.5}", "server.port must be an integer, not the number 80.5"),
        ("server: {port: null}", "server.port must be an integer, not nothing"),
        ("server: {port: [1]}", "server.port must be an integer, not a list"),
        ("server: {port: 70000}", "server.port must be 65535 or less, not 70000"),
        ("server: {drain_s: .inf}", "server.drain_s must be a finite number, not inf"),
        ("server: {drain_s: soon}", "server.drain_s must be a number, not the text 'soon'"),
        ("server: {host: ''}", "server.host must not be empty"),
        ("server: 8000", "server is a section of settings, not the number 8000"),
        ("model: 7", "model must be text, not the number 7"),
        ("model: {name: x}", "model must be text, not a section"),
        ("lora: foo", "lora must be NAME=FOLDER, such as sql=/models/sql-adapter, not the text 'foo'"),
        ("launcher: slurm", "launcher must be one of local, ray, not the text 'slurm'"),
        ("log: {level: off}", "log.level must be one of debug, info, warning, error, not false"),
        (
            "topology: 1",
            "topology must be colocated, 2xcolocated, prefill+decode workers such as 1+1, or auto, not the number 1",
        ),
        ("kvpool: {verify_pages: 1}", "kvpool.verify_pages must be true or false, not the number 1"),
        ("price: {kwh: -0.3}", "price.kwh must be more than 0, not -0.3"),
        ("price: {device_hour: .nan}", "price.device_hour must be a finite number, not nan"),
        ("price: {device_hour: cheap}", "price.device_hour must be a number, not the text 'cheap'"),
        (
            "launch: {still_s: 9}",
            "launch.still_s is for experiments: choose a preset, or say --set launch.still_s=VALUE",
        ),
        ("engine: {threads: 0}", "engine.threads must be 1 or more, not 0"),
        ("engine: {kv_memory_mb: -1}", "engine.kv_memory_mb must be 1 or more, not -1"),
        ("engine: {look_ahead: 2}", "engine.look_ahead must be one of auto, 0, 1, not the number 2"),
        (
            "schedule: {late: keep}",
            "schedule.late is for experiments: choose a preset, or say --set schedule.late=VALUE",
        ),
        ("server: {max_rt_queue: 5}", "server.max_rt_queue is not a setting: did you mean server.max_queue?"),
        ("wire: {death_s: 0}", "wire.death_s must be 0.5 or more, not 0.0"),
    ],
)
def test_a_wrong_line_is_named_with_its_file(tmp_path: Path, text: str, problem: str) -> None:
    path = _file(tmp_path, text)
    message = _refusal(path=path)
    assert message.startswith(f"{path}: ")
    assert message.removeprefix(f"{path}: ") == problem


@pytest.mark.parametrize(
    "text", ["server: [", "a: 1\n b: 2\n", "- 1\n- 2\n", "just text", "\x00", "at: 2026-99-99", "a: &a {b: *a}"]
)
def test_a_file_that_holds_no_settings(tmp_path: Path, text: str) -> None:
    path = _file(tmp_path, text)
    assert str(path) in _refusal(path=path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert (
        _refusal(path=tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'} cannot be read: No such file or directory"
    )
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff\n")
    assert "is not valid YAML" in _refusal(path=tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("SERVER_PROT", "1", "ALIGNEDSERVE_SERVER_PROT is not a setting: did you mean ALIGNEDSERVE_SERVER_PORT?"),
        ("PORT", "1", "ALIGNEDSERVE_PORT is not a setting: did you mean ALIGNEDSERVE_SERVER_PORT?"),
        ("SERVER_PORT", "x", "ALIGNEDSERVE_SERVER_PORT: server.port must be an integer, not the text 'x'"),
        ("SERVER_PORT", "", "ALIGNEDSERVE_SERVER_PORT: server.port must be an integer, not the text ''"),
        ("KVPOOL_VERIFY_PAGES", "maybe", "kvpool.verify_pages must be true or false, not the text 'maybe'"),
        (
            "TOPOLOGY",
            "0+1",
            "topology must be colocated, 2xcolocated, prefill+decode workers such as 1+1, or auto, not the text '0+1'",
        ),
        (
            "SCHEDULE_LATE",
            "keep",
            "environment: schedule.late is for experiments: choose a preset, or say --set schedule.late=VALUE",
        ),
        ("WIRE_DEATH_S", "nan", "wire.death_s must be a finite number, not nan"),
        ("SERVER_API_KEY", "", "ALIGNEDSERVE_SERVER_API_KEY: server.api_key must not be empty"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str, problem: str) -> None:
    assert problem in _refusal(env={f"ALIGNEDSERVE_{variable}": text})


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_no_settings() -> None:
    links = {
        "ALIGNEDSERVE_SERVICE_HOST": "10.0.0.1",
        "ALIGNEDSERVE_SERVICE_PORT_HTTP": "8000",
        "ALIGNEDSERVE_PORT": "tcp://10.0.0.1:8000",
        "ALIGNEDSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
        # Kubernetes sets this for a service called alignedserve-server
        "ALIGNEDSERVE_SERVER_PORT": "tcp://10.0.0.1:8000",
    }
    assert load({}, links, None) == Config()


def test_a_wrong_flag_is_named() -> None:
    assert _refusal({"server.port": "x"}) == "--port: server.port must be an integer, not the text 'x'"
    assert "--pool-memory-mb" in _refusal({"kvpool.memory_mb": "-3"})
    assert _refusal({"server.prot": "1"}) == "flags: server.prot is not a setting: did you mean server.port?"


_ON_RAY = {"launcher": "ray", "ray.address": "auto"}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            {"schedule.scheduler": "round_robin"},
            "schedule: scheduler round_robin cannot be used with chunking slo: set chunking to none or fixed",
        ),
        ({"schedule.scheduler": "backpack"}, "schedule.scheduler 'backpack' is not known: choose aligned, "),
        (
            {"schedule.scheduler": "apt_serve"},
            "schedule: scheduler apt_serve cannot be used with chunking slo: set chunking to none or fixed",
        ),
        ({"kvpool.page_size": 24}, "kvpool.page_size must be a multiple of engine.block_size 16, not 24"),
        (
            {"engine.max_step_tokens": 8, "engine.max_batch": 64},
            "engine.max_step_tokens must be at least engine.max_batch 64, not 8",
        ),
        (
            {"transport": "collective", "topology": "2xcolocated"},
            "transport collective is between prefill and decode workers: topology 2xcolocated has no prefill workers",
        ),
        (
            {"wire.transfer_timeout_s": 0.0},
            "--set: wire.transfer_timeout_s must be more than 0, not 0.0",
        ),
        ({"schedule.memory": "half"}, "schedule.memory 'half' is not known: choose plain, hybrid, weighed, two_ended"),
        (
            {"schedule.memory": "two_ended:all"},
            "schedule.memory 'two_ended:all': behind the colon stands a share, such as 0.2",
        ),
        (
            {"schedule.memory": "hybrid", "schedule.room": "chunks"},
            "schedule: memory hybrid cannot be used with room chunks: set room to whole or growing",
        ),
        (
            {
                "schedule.memory": "hybrid",
                "schedule.scheduler": "fcfs",
            },
            "schedule: memory hybrid cannot be used with scheduler fcfs: set scheduler to aligned or best_fit or bros",
        ),
        (
            {"schedule.memory": "two_ended", "schedule.room": "whole"},
            "schedule: memory two_ended cannot be used with room whole: set room to growing",
        ),
        (
            {
                "schedule.memory": "two_ended",
                "schedule.room": "growing",
                "schedule.scheduler": "mlfq",
                "schedule.chunking": "fixed",
            },
            "schedule: scheduler mlfq cannot be used with memory two_ended: set memory to plain",
        ),
        (
            {
                "schedule.memory": "two_ended",
                "schedule.room": "growing",
                "transport": "collective",
                "topology": "1+1",
            },
            "transport cannot be collective: KV that comes directly needs blocks of its own: schedule.memory"
            " two_ended shares them: set it to host",
        ),
        (
            {"engine.tensor_parallel_size": 2, "launcher": "ray", "ray.gpus_per_worker": 0.5},
            "ray.gpus_per_worker counts for each rank, and NCCL refuses two ranks on one GPU: with"
            " engine.tensor_parallel_size 2 it is 1, or 0 on CPUs, not 0.5",
        ),
        (
            {**_ON_RAY, "engine.tensor_parallel_size": 4, "ray.gpus_per_worker": 4},
            "ray.gpus_per_worker counts for each rank, and a rank computes on one GPU: set it to 1, not 4, and"
            " engine.tensor_parallel_size, which is 4, to the GPUs that share the model",
        ),
        (
            {**_ON_RAY, "ray.gpus_per_worker": 0.5},
            "ray.gpus_per_worker 0.5 puts several workers on a GPU, and each would take all of its memory: set"
            " engine.kv_memory_mb to what each is to take",
        ),
        (
            {**_ON_RAY, "engine.device": "cpu", "ray.gpus_per_worker": 1},
            "ray.gpus_per_worker 1 reserves GPUs, and with engine.device cpu nothing computes on them: set"
            " engine.device to cuda, or ray.gpus_per_worker to 0",
        ),
        (
            {**_ON_RAY, "engine.device": "cuda", "ray.gpus_per_worker": 0},
            "engine.device cuda needs GPUs, and ray.gpus_per_worker 0 reserves none: set it to 1, or to 0.5 where two"
            " workers share a GPU",
        ),
        (
            {"launcher": "ray", "ray.place_s": 5.0},
            "ray: its settings are for the nodes of a cluster: set ray.address too, or none of them",
        ),
        (
            {"scale.shrink_after_s": 5.0},
            "scale.shrink_after_s is for workers that come and go: set scale.prefill or scale.decode too",
        ),
        (
            {"schedule.predictor": "oracle"},
            "schedule.predictor oracle works in the simulator only: set hash",
        ),
        (
            {"engine.kv_dtype": "int8", "preset": "aligned-hybrid"},
            "engine.kv_dtype int8 leaves no room for hidden vectors, which schedule.memory hybrid keeps in blocks",
        ),
        (
            {"engine.kv_dtype": "int8", "kvpool.compression": "auto"},
            "engine.kv_dtype int8 keeps pages in int8 already: set kvpool.compression to off",
        ),
    ],
)
def test_settings_that_do_not_go_together(flags: dict[str, Any], problem: str) -> None:
    assert problem in _refusal(flags)


def test_a_configuration_made_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"engine\.block_size must be 1 or more"):
        Config(engine=EngineConfig(block_size=0))
    with pytest.raises(ConfigError, match="at least 1"):
        Topology(0, 0)


def test_a_key_is_never_shown() -> None:
    assert "hush" not in repr(Config(server=ServerConfig(api_key="hush")))
    with pytest.raises(ConfigError) as raised:
        parse({"server": {"api_key": ["hush"]}})
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize("text", ["colocated", "2xcolocated", "1+1", "2+2", "8+128"])
def test_a_topology_is_written_as_it_is_read(text: str) -> None:
    assert str(Topology.parse(text)) == text


_NO_TOPOLOGIES = [
    "",
    "1",
    "+1",
    "1+",
    "0+1",
    "1+0",
    "01+1",
    "1 + 1",
    "-1+1",
    "1+1+1",
    "Colocated",
    "0xcolocated",
    "2 x colocated",
    "1+1\n",
]


@pytest.mark.parametrize("text", _NO_TOPOLOGIES)
def test_what_is_no_topology(text: str) -> None:
    assert "topology must be colocated" in _refusal({"topology": text})


def test_no_two_settings_share_a_name() -> None:
    every = settings().values()
    flags = [flag for setting in every for flag in setting.flags]
    assert len(set(flags)) == len(flags)
    assert len({setting.variable for setting in every}) == len(every)
    assert all(setting.help for setting in every)


_names = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)
_words = st.text(st.characters(codec="utf-8", exclude_characters=",*"), min_size=1).map(str.strip).filter(len)
_model_names = st.lists(_words, min_size=1, unique=True).map(lambda names: ModelNames((*names,)))
_counts = st.integers(1, 10**12)
_seconds = st.floats(0.001, 1e9)


@st.composite
def _configs(draw: st.DrawFn) -> Config:
    block_size, max_batch = draw(_counts), draw(_counts)
    return Config(
        model=draw(_names),
        served_model_name=draw(st.none() | _model_names),
        tool_call_parser=draw(st.sampled_from(["auto", "hermes", "openai"])),
        topology=draw(st.builds(Topology, st.integers(0, 9999), st.integers(1, 9999))),
        transport=draw(st.sampled_from([TransportName.AUTO, TransportName.HOST])),
        launcher=draw(st.sampled_from(Launcher)),
        server=ServerConfig(
            draw(_names), draw(st.integers(0, 65_535)), draw(st.none() | _names), draw(_counts), draw(_seconds)
        ),
        engine=EngineConfig(
            dtype=draw(st.sampled_from(Dtype)),
            max_model_len=draw(st.none() | _counts),
            block_size=block_size,
            kv_memory_mb=draw(_counts),
            max_step_tokens=max_batch + draw(_counts),
            max_batch=max_batch,
            threads=draw(st.none() | _counts),
        ),
        kvpool=PoolConfig(
            draw(_counts),
            block_size * draw(_counts),
            draw(st.booleans()),
            compression=draw(st.sampled_from(Compression)),
        ),
        wire=WireConfig(0.5 + draw(_seconds), draw(_seconds)),
        log=LogConfig(draw(st.sampled_from(LogLevel)), draw(st.sampled_from(LogFormat))),
    )


@pytest.mark.parametrize(
    ("flags", "steps"),
    [({}, 0), ({"look_ahead": "1"}, 1), ({"device": "cuda"}, 1), ({"look_ahead": "0", "device": "cuda"}, 0)],
)
def test_steps_are_planned_ahead_where_that_is_asked_for_or_on_a_gpu(flags: dict[str, str], steps: int) -> None:
    config = load({f"engine.{name}": value for name, value in flags.items()}, {}, None)
    assert config.engine.steps_ahead(config.policy) == steps
    shared = {"schedule.memory": "two_ended", "engine.look_ahead": "auto", "engine.device": "cuda"}
    assert load(shared, {}, None).engine.steps_ahead(load(shared, {}, None).policy) == 0


@pytest.mark.parametrize(
    ("flags", "seats", "tokens"),
    [
        ({"device": "cpu"}, 64, 512),
        ({"device": "cuda"}, 256, 2048),
        ({"device": "cuda", "max_batch": 8}, 8, 2048),
        ({"device": "cuda", "max_step_tokens": 100}, 100, 100),
        ({"device": "cpu", "max_step_tokens": 8}, 8, 8),
        ({"device": "cpu", "max_batch": 1000}, 1000, 1000),
        ({"device": "cuda", "max_batch": 5000, "max_step_tokens": 6000}, 5000, 6000),
    ],
)
def test_a_step_is_larger_on_a_gpu_and_what_is_given_outweighs_the_rest(
    flags: dict[str, str | int], seats: int, tokens: int
) -> None:
    config = load({f"engine.{name}": value for name, value in flags.items()}, {}, None)
    assert (config.engine.seats, config.engine.step_tokens) == (seats, tokens)
    assert config.policy.expected_chunk == tokens


def test_what_a_preset_says_of_a_step_holds_on_every_device() -> None:
    on_gpu = load({"preset": "sarathi", "engine.device": "cuda"}, {}, None).engine
    assert (on_gpu.seats, on_gpu.step_tokens) == (256, 512)


def test_what_a_device_or_a_schedule_cannot_do_is_refused() -> None:
    assert load({"engine.cuda_graphs": "off"}, {}, None).engine.cuda_graphs is Graphs.OFF
    with pytest.raises(
        ConfigError, match=r"^engine\.cuda_graphs on needs engine\.device cuda, not cpu: set it to auto"
    ):
        load({"engine.cuda_graphs": "on", "engine.device": "cpu"}, {}, None)
    shared = {"schedule.memory": "two_ended", "engine.look_ahead": "1"}
    with pytest.raises(ConfigError, match=r"^engine\.look_ahead cannot be 1: with memory two_ended .*: set it to 0$"):
        load(shared, {}, None)


def test_off_in_a_file_is_the_word(tmp_path: Path) -> None:
    config = load({}, {}, _file(tmp_path, "engine: {cuda_graphs: off}\nkvpool: {compression: off}"))
    assert (config.engine.cuda_graphs, config.kvpool.compression) == (Graphs.OFF, Compression.OFF)


@given(_configs())
def test_a_launcher_hands_its_processes_the_very_same_configuration(config: Config) -> None:
    assert parse(json.loads(json.dumps(dump(config)))) == config


_plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_keys = st.sampled_from(["server", "port", "log", "level", "model", "topology"]) | st.text()
_trees = st.recursive(_plain, lambda tree: st.lists(tree, max_size=2) | st.dictionaries(_keys, tree, max_size=3))


def _parsed(tree: dict[str, Any]) -> Config | ConfigError:
    try:
        return parse(tree)
    except ConfigError as error:
        return error


@given(st.dictionaries(_keys, _trees))
def test_any_tree_is_a_configuration_or_a_one_line_refusal(tree: dict[str, Any]) -> None:
    assert "\n" not in str(_parsed(tree))


def test_an_unknown_reasoning_parser_is_one_line_that_lists_the_known() -> None:
    assert load({"reasoning_parser": "granite"}, {}, None).reasoning_parser == "granite"
    said = _refusal({"reasoning_parser": "odd"})
    assert said.startswith("reasoning_parser 'odd' is not known: choose one of auto, none, deepseek_r1, ")
    assert "openai_gptoss" in said


def test_an_unknown_tool_call_parser_is_one_line_that_lists_the_known() -> None:
    assert load({"tool_call_parser": "qwen3_xml"}, {}, None).tool_call_parser == "qwen3_xml"
    said = _refusal({"tool_call_parser": "odd"})
    assert said.startswith("tool_call_parser 'odd' is not known: choose one of auto, cohere_command3, ")
    assert "hermes" in said
