"""Where custom policies come from, and what is said of those that cannot be used."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from alignedserve.config.config import dump, load, of_preset, parse
from alignedserve.errors import ConfigError
from alignedserve.policies.kinds import PolicyKind
from alignedserve.policies.source import ENTRY_POINTS, PolicySource, check, classes_of

ORDER = """\
from alignedserve.policies import OrderPolicy, RequestInLine

class Newest(OrderPolicy):
    def key(self, request: RequestInLine) -> float:
        return -request.arrival_at
"""


def test_a_file_gives_the_classes_that_it_defines() -> None:
    assert list(classes_of(PolicySource("newest.py", ORDER))) == [PolicyKind.ORDER]


def test_a_file_may_define_dataclasses() -> None:
    state = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
    assert list(classes_of(PolicySource("state.py", state + ORDER))) == [PolicyKind.ORDER]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", r"has no class for a decision: write a subclass of OrderPolicy, "),
        ("def", r"cannot be imported: SyntaxError: .*, line 1$"),
        ("\nimport nothing_here", r"cannot be imported: ModuleNotFoundError: .*'nothing_here', line 2$"),
        (ORDER.replace("def key", "def keys"), r"has no method key in its class Newest$"),
        (ORDER.replace("self, request", "self"), r"is asked with request, which Newest\.key does not take$"),
        ("raise SystemExit(3)", r"cannot be imported: SystemExit: 3, line 1$"),
        (ORDER + "class Oldest(Newest): pass", r"has two classes for one decision: Newest, Oldest$"),
        (ORDER + "    def __init__(self): 1 / 0", r"cannot make Newest: ZeroDivisionError: .*, line 6$"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "policy.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^the policy {path} {said}"):
        load({"schedule.policy": str(path)}, {}, None)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py cannot be read: No such file or directory"):
        load({"schedule.policy": "nowhere.py"}, {}, None)
    (tmp_path / "latin.py").write_bytes(b"# \xe4")
    with pytest.raises(ConfigError, match="it is not text in UTF-8"):
        PolicySource.parse(str(tmp_path / "latin.py"))


def test_a_package_offers_policies_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = EntryPoint("newest", "tests.policies.offered:Newest", ENTRY_POINTS)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints([offered]).select(group=group))
    assert list(classes_of(PolicySource.parse("newest"))) == [PolicyKind.ORDER]
    with pytest.raises(ConfigError, match=r"'oldest' is neither a file nor an entry point .*: there are newest"):
        check(PolicySource.parse("oldest"))


def test_the_text_of_a_file_travels_with_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "newest.py"
    path.write_text(ORDER)
    config = load({"schedule.policy": str(path)}, {}, None)
    path.unlink()  # as on another node
    assert parse(dump(config)).policy.own.decides(PolicyKind.ORDER)


def test_an_order_goes_with_what_goes_by_an_order() -> None:
    source = PolicySource("newest.py", ORDER)
    assert not of_preset("aligned", {"schedule.policy": source}).policy.ordering.is_by_arrival
    with pytest.raises(
        ConfigError, match="a policy for order goes not with scheduler vllm_v1: set scheduler to aligned or bros or"
    ):
        of_preset("vllm-chunked", {"schedule.policy": source})


def test_a_scheduler_goes_with_schedulers_that_take_no_turns_and_with_no_step_ahead() -> None:
    head = "from alignedserve.schedulers.scheduler import Scheduler\n"
    source = PolicySource("mine.py", f"{head}class P(Scheduler):\n    def plan(self, view): return 1\n")
    assert of_preset("vllm-chunked", {"schedule.policy": source}).policy.why_not_ahead is not None
    for preset in ("mlfq", "round-robin", "fastserve", "apt-serve-kv", "tgi"):
        with pytest.raises(ConfigError, match=r"^schedule: a policy for scheduler goes not with scheduler "):
            of_preset(preset, {"schedule.policy": source})
    with pytest.raises(ConfigError, match="look_ahead cannot be 1: a policy for scheduler is asked before each step"):
        load({"schedule.policy": str(source), "engine.look_ahead": "1"}, {}, None)
