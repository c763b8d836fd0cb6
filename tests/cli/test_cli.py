"""Tests that the command line answers at once, builds the configuration, and fails in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from alignedserve import NO_LAB
from alignedserve.cli import main as cli
from alignedserve.cli.foreign import COMMANDS, FLAGS
from alignedserve.config.choices import Launcher
from alignedserve.config.config import Config, dump, parse, sections, settings
from alignedserve.config.setting import Reach
from alignedserve.errors import ModelError

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "fastapi", "transformers", "yaml", "httpx", "numpy", "zmq", "huggingface_hub", "pydantic")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.startswith("ALIGNEDSERVE_"):
            monkeypatch.delenv(variable)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Return a list of the configurations that `serve` was asked to launch; each launch ends with 7."""
    configs: list[Config] = []

    def serve(config: Config, _: object) -> int:
        configs.append(config)
        return 7

    launch: Any = ModuleType("alignedserve.launch.launch")
    launch.serve = serve
    monkeypatch.setitem(sys.modules, "alignedserve.launch.launch", launch)
    return configs


def _refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("alignedserve: ")
    return err.removeprefix("alignedserve: ").strip()


def test_serve_without_anything_is_the_default_configuration(served: list[Config]) -> None:
    assert cli.main(["serve"]) == 7
    assert served == [Config()]


def test_flags_reach_the_configuration(served: list[Config]) -> None:
    line = "serve org/name --host 0.0.0.0 --port 9 --topology 2+2 --ray --dtype float32 --max-model-len 99"
    more = "--pool-memory-mb 8 --max-num-seqs 3 --log-format json --pool-verify-pages --api-key k"
    cli.main([*line.split(), *more.split()])
    [config] = served
    assert (config.model, config.server.host, config.server.port) == ("org/name", "0.0.0.0", 9)
    assert (str(config.topology), config.launcher) == ("2+2", Launcher.RAY)
    assert (config.engine.dtype.value, config.engine.max_model_len, config.engine.max_batch) == ("float32", 99, 3)
    assert (config.kvpool.memory_mb, config.kvpool.verify_pages, config.server.api_key) == (8, True, "k")


def test_a_model_is_named_with_a_flag_or_without(served: list[Config]) -> None:
    for line in ("serve org/name", "serve --model org/name", "serve org/name --model org/name"):
        cli.main(line.split())
    assert [config.model for config in served] == ["org/name"] * 3


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("serve", "warning"),
        ("serve -v", "info"),
        ("serve --log-level info", "info"),
        ("serve --log-level debug", "debug"),
    ],
)
def test_a_terminal_sees_warnings_alone_unless_asked(
    served: list[Config], monkeypatch: pytest.MonkeyPatch, line: str, level: str
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    cli.main(line.split())
    assert served[0].log.level.value == level


def test_a_file_that_names_a_level_is_followed(
    served: list[Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    (tmp_path / "a.yaml").write_text("log: {level: info}\n")
    cli.main(["serve", "--config", str(tmp_path / "a.yaml")])
    assert served[0].log.level.value == "info"


def test_a_preset_is_printed_with_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "fcfs"]) == 0
    printed = capsys.readouterr().out
    assert "  * schedule.scheduler: fcfs\n" in printed
    assert "    schedule.reuse: " in printed


def test_flags_outweigh_the_environment_and_that_the_file(
    served: list[Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: file\nserver: {port: 1, host: file}\nkvpool: {verify_pages: true}\n")
    monkeypatch.setenv("ALIGNEDSERVE_SERVER_HOST", "variable")
    cli.main(["serve", "--config", str(path), "--port", "3", "--no-pool-verify-pages"])
    [config] = served
    assert (config.model, config.server.host, config.server.port) == ("file", "variable", 3)
    assert not config.kvpool.verify_pages


def _shown(capsys: pytest.CaptureFixture[str], flag: str) -> set[str]:
    """Return the flags that a help text names."""
    with pytest.raises(SystemExit):
        cli.main(["serve", flag])
    return set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))


def test_help_shows_the_common_settings_and_help_all_every_setting(
    served: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    usual, every = _shown(capsys, "--help"), _shown(capsys, "--help-all")
    flags = {setting.path: set(setting.flags) for setting in settings().values() if setting.path != "model"}
    assert all(names <= every for names in flags.values())
    common = {path for path, names in flags.items() if names & usual}
    assert common == {path for path in flags if settings()[path].reach is Reach.COMMON}
    assert 20 <= len(common) <= 30
    assert served == []


def test_help_all_says_what_each_section_is_for(served: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(str(section.__doc__).splitlines()[0] in shown for section in sections().values())
    assert served == []


def test_settings_stay_few() -> None:
    """Each new setting is one more for every user to read. What only presets change is no setting (setting.py).

    The newest is `prefill.lends`, in place of ray.place_s."""
    assert len(settings()) <= 70


def test_print_config_prints_what_would_be_served_without_secrets(
    served: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "x", "--topology", "1+1", "--print-config"]) == 0
    assert parse(yaml.safe_load(capsys.readouterr().out)) == Config(model="x", topology=Config().topology.parse("1+1"))
    stores = ["--jobs-store", "redis://:hush@db/0", "--set", "jobs.files=s3://hush:hush@bucket"]
    assert cli.main(["serve", "--api-key", "hush", *stores, "--print-config"]) == 0
    assert "hush" not in capsys.readouterr().out
    assert served == []


def test_a_printed_configuration_can_be_served(
    served: list[Config], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cli.main(["serve", "x", "--port", "5", "--print-config"])
    (tmp_path / "a.yaml").write_text(capsys.readouterr().out)
    cli.main(["serve", "--config", str(tmp_path / "a.yaml")])
    assert dump(served[0])["server"]["port"] == 5


@pytest.mark.parametrize(
    ("words", "model", "names"),
    [
        ("M --served-model-name a b claude-*", "M", ("a", "b", "claude-*")),
        ("M --served-model-name a,b", "M", ("a", "b")),
        ("--served-model-name a b --model M", "M", ("a", "b")),
        ("--served-model-name a --port 1 M", "M", ("a",)),
        ("--served-model-name a M", "M", ("a",)),
        ("--served-model-name a M --served-model-name b", "M", ("b",)),
        ("--served-model-name a,b", "auto", ("a", "b")),
        ("M", "M", ("M",)),
    ],
)
def test_a_model_has_names(served: list[Config], words: str, model: str, names: tuple[str, ...]) -> None:
    cli.main(["serve", *words.split()])
    assert (served[0].model, served[0].model_names) == (model, names)


@pytest.mark.parametrize("words", ["", ",", "*", "claude-*,a"])
@pytest.mark.usefixtures("served")
def test_the_first_name_is_the_models_own(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "M", "--served-model-name", words]) != 0
    assert "served_model_name must be a name, or several, such as my-model,claude-*" in capsys.readouterr().err


def test_what_set_changes_of_a_preset_is_printed_as_a_comment(
    served: list[Config], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cli.main(["serve", "--set", "schedule.evict=false", "--set", "schedule.reuse=false", "--print-config"])
    printed = capsys.readouterr().out
    assert printed.endswith("\n# --set schedule.evict=false\n")
    (tmp_path / "a.yaml").write_text(printed)
    cli.main(["serve", "--config", str(tmp_path / "a.yaml")])
    assert (served[0].schedule.evict, served[0].schedule.reuse) == (True, False)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("serve --port x", "--port: server.port must be an integer, not the text 'x'"),
        ("serve --prot 1", "--prot is not understood: did you mean --port? (see alignedserve serve --help)"),
        ("serve --prot=1", "--prot is not understood: did you mean --port? (see alignedserve serve --help)"),
        ("serve --por 1", "--por is not understood: did you mean --port? (see alignedserve serve --help)"),
        ("stop --prot 1", "--prot is not understood: did you mean --port? (see alignedserve stop --help)"),
        ("serve a b", "b is not understood (see alignedserve serve --help)"),
        ("serve a --model b", "--model b and a name two models: say one"),
        ("serv", "'serv' is no command: did you mean serve? (see alignedserve --help)"),
        ("serve --port", "argument --port: expected one argument (see alignedserve serve --help)"),
        ("serve --config /none.yaml", "/none.yaml cannot be read: No such file or directory"),
        (
            "serve --tensor-parallel-size 0",
            "--tensor-parallel-size: engine.tensor_parallel_size must be 1 or more, not 0",
        ),
        ("serve --set server=1", "--set: server is a section of settings: name a setting in it, such as server.host"),
        (
            "chat --max-tokens x",
            "argument --max-tokens: must be a whole number of 1 or more, not 'x' (see alignedserve chat --help)",
        ),
        (
            "chat --temperature nan",
            "argument --temperature: must be a number of 0 or more, not 'nan' (see alignedserve chat --help)",
        ),
        (
            "profile --out /none/p --budget nan",
            "argument --budget: must be a number above 0, not 'nan' (see alignedserve profile --help)",
        ),
        ("status --api-key ключ", "the API key holds characters that a key cannot have"),
        ("batch list --api-key ключ", "the API key holds characters that a key cannot have"),
        ("key ann --file /none/keys.yaml", "/none/keys.yaml cannot be written: /none is not a folder"),
        ("key ann --file /", "/ is a folder: name a file"),
        ("key ann --file /dev/null", "/dev/null is not a file"),
        (
            "serve --schedule-late keep",
            "--schedule-late is not understood: choose a preset, or say --set schedule.late=VALUE"
            " (see alignedserve serve --help)",
        ),
        (
            "run qwen2.5",
            "'run' is no command: `alignedserve serve MODEL` serves it, and `alignedserve chat` chats with it from"
            " another terminal (see alignedserve --help)",
        ),
        ("ps", "'ps' is no command: `alignedserve status` shows what is served (see alignedserve --help)"),
        (
            "serve x --ctx-size 4096",
            "--ctx-size is not understood: did you mean --max-model-len? (see alignedserve serve --help)",
        ),
        (
            "serve x --max_seq_len=4096",
            "--max_seq_len is not understood: did you mean --max-model-len? (see alignedserve serve --help)",
        ),
        ("serve x -c 4096", "-c is not understood: did you mean --max-model-len? (see alignedserve serve --help)"),
        (
            "serve x -ngl 99",
            "-ngl is not understood: all layers run on a GPU where there is one: --device says where"
            " (see alignedserve serve --help)",
        ),
        ("doctor --jsn", "--jsn is not understood: did you mean --json? (see alignedserve doctor --help)"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(capsys: pytest.CaptureFixture[str], line: str, problem: str) -> None:
    assert _refusal(capsys, *line.split()) == problem


def test_what_peers_have_leads_to_what_is_here() -> None:
    """A command or flag that is ours by now, or leads to none of ours, is removed from the table."""
    ours = {flag for setting in settings().values() for flag in setting.flags}
    assert not FLAGS.keys() & ours
    assert {named for said in FLAGS.values() for named in re.findall("--[a-z-]+", said)} <= ours
    assert not COMMANDS.keys() & set(cli.command_names())
    named = {command for said in COMMANDS.values() for command in re.findall("`alignedserve ([a-z]+)", said)}
    assert named <= set(cli.command_names())


def test_a_model_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A script with an empty variable gets an error, not another model."""
    assert _refusal(capsys, "serve", "").endswith("model must not be empty")


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "srve" in _refusal(capsys, "srve")
    assert "command" in _refusal(capsys)


@pytest.mark.parametrize(("error", "status"), [(ModelError("no such model"), 2), (KeyboardInterrupt(), 130)])
def test_errors_of_the_launcher_end_without_a_traceback(
    served: list[Config], capsys: pytest.CaptureFixture[str], error: BaseException, status: int
) -> None:
    def fail(*_: object) -> int:
        raise error

    sys.modules["alignedserve.launch.launch"].serve = fail  # pyrefly: ignore[missing-attribute]
    assert cli.main(["serve"]) == status
    assert capsys.readouterr().err == ("alignedserve: no such model\n" if status == 2 else "")
    assert served == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("alignedserve ")


@pytest.mark.parametrize("line", ["--help", "serve --help"])
def test_help_imports_nothing_heavy(line: str) -> None:
    """A test of imports does not depend on the machine's load; without heavy imports, help takes well under 0.3 s."""
    command = [sys.executable, "-X", "importtime", "-m", "alignedserve.cli.main", *line.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {row.rpartition("|")[2].strip() for row in done.stderr.splitlines() if row.startswith("import time:")}
    assert ("alignedserve.config.config" in imported) == ("serve" in line), "only a command's own flags take settings"
    assert {name.partition(".")[0] for name in imported}.isdisjoint(HEAVY)
    assert done.stdout.startswith("usage: alignedserve")


def test_a_reader_who_leaves_early_is_no_error() -> None:
    """A reader such as `| head` ends early: the command writes no error, and its status is that of a closed pipe."""
    command = [sys.executable, "-m", "alignedserve", "presets"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_a_full_disk_is_said_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "alignedserve", "presets"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "alignedserve: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "words", [["simulate", "--seed", "3"], ["plan"], ["reproduce", "bros"], ["fuzz", "--help"], ["bench"]]
)
def test_without_the_lab_its_commands_say_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda _: None)
    assert _refusal(capsys, *words) == f"{words[0]} {NO_LAB}"


def test_without_the_lab_all_else_is_there(tmp_path: Path) -> None:
    """A package without its folder lab/: the help of each command, and what Python code imports."""
    (tmp_path / "alignedserve").mkdir()
    for path in (ROOT / "alignedserve").iterdir():
        if path.name != "lab":
            (tmp_path / "alignedserve" / path.name).symlink_to(path.resolve())
    code = (
        "import sys\n"  # an editable installation finds the folder wherever it is
        "sys.meta_path[:] = [it for it in sys.meta_path if '__editable__' not in getattr(it, '__module__', '')]\n"
        "import alignedserve\nfrom alignedserve import LLM\nfrom alignedserve.cli.main import main\n"
        "assert main(['presets']) == 0\nassert main(['simulate', '--seed', '1']) == 2\nalignedserve.compare"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert f"alignedserve: simulate {NO_LAB}\n" in done.stderr
    assert done.stderr.splitlines()[-1] == f"ImportError: compare {NO_LAB}"
