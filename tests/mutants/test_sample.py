"""Mutants that are drawn: what operators make of code, how they are planted, and when a score has fallen."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.protocol.cancelled import CancelledAttempts
from tests.mutants.callers import Callers
from tests.mutants.drawing import draw, files_by_folder, is_core, shares
from tests.mutants.forked import Crashed, TakesTooLong, forked
from tests.mutants.mutant import Mutant
from tests.mutants.operators import changes
from tests.mutants.other_code import give_code, probe
from tests.mutants.planted import SOURCE, parsed
from tests.mutants.score import Row, Score, falls, points, read, row_of, write
from tests.mutants.trying import KILLED, SURVIVED, TIMED_OUT, Tried, after_round, environment

CODE = '''
"""A docstring."""
LIMIT: int = 3

@decorated(limit=4)
def within(tries: int = 1, *, least: bool = True) -> list[int]:
    """Say nothing."""
    log.info("at %d", 5)
    if tries < LIMIT and not least:
        raise ValueError(f"{tries + 1} are too many")
    return [tries]

class Kept:
    def __repr__(self) -> str:
        return "kept" * 2
'''


def _operators(tmp_path: Path, code: str) -> set[str]:
    file = tmp_path / "code.py"
    file.write_text(code, encoding="utf-8")
    return {f"{change.place.function}: {change.operator}" for change in changes(str(file))}


def test_operators_change_what_runs_and_leave_texts_types_and_decorators(tmp_path: Path) -> None:
    assert _operators(tmp_path, CODE) == {
        *(": constant +1", ": constant -1", "within: constant", "within: constant +1", "within: constant -1"),
        *("within: condition negated", "within: And to Or", "within: Lt to LtE", "within: Not left out"),
        *("within: raise left out", "within: return nothing"),
    }


def test_a_case_an_argument_and_a_loop(tmp_path: Path) -> None:
    code = (
        "def hear(event):\n    match event:\n        case 1: break_off(at=2)\n        case _: pass\n"
        "    for each in event:\n        if each: continue\n        self.last = max(each, key=len)\n"
    )
    assert _operators(tmp_path, code) == {
        *("hear: case left out", "hear: argument at left out", "hear: statement left out", "hear: constant +1"),
        *("hear: constant -1", "hear: condition negated", "hear: continue to break", "hear: max to min"),
        "hear: argument key left out",
    }


def test_what_is_drawn_changes_the_code_and_compiles() -> None:
    for mutant in draw(["router/members.py", "alignedserve/protocol/cancelled.py"], 30, seed=1):
        compile(mutant.tree(), mutant.file, "exec")
        assert ast.dump(mutant.tree()) != ast.dump(parsed(mutant.file))


def _drawn(number: int, seed: int) -> list[str]:
    return [mutant.name for mutant in draw(["router/members.py"], number, seed)]


def test_a_larger_draw_has_the_mutants_of_a_smaller_one_and_another_seed_has_others() -> None:
    assert _drawn(30, seed=1)[:10] == _drawn(10, seed=1) != _drawn(10, seed=2)


def test_every_folder_with_product_code_has_its_share() -> None:
    lines = dict.fromkeys(files_by_folder(), 1000)
    assert {"router", "kernels/triton", "alignedserve/gateway/http"} <= lines.keys()
    assert min(shares(lines, 0).values()) == 3
    assert set(shares(lines, 10 * len(lines)).values()) == {10}
    assert [is_core(folder) for folder in ("router/placing", "alignedserve/gateway")] == [True, False]


_MUTANT = Mutant(
    "any attempt is cancelled",
    "alignedserve/protocol/cancelled.py",
    "self._newest.get(request, -1) >= number",
    "True",
    "Nothing runs.",
)


def _is_cancelled() -> bool:
    return ("a", 0) in CancelledAttempts()


def test_a_mutant_is_planted_into_functions_of_a_fork_and_not_into_its_parent() -> None:
    def planted() -> bool:
        plant = _MUTANT.plant()
        return bool(give_code({plant.file: plant.tree()})) and _is_cancelled()

    assert forked(planted, cpu_s=60) is True
    assert not _is_cancelled()


def test_tests_that_may_run_a_function_are_found_by_who_mentions_it(tmp_path: Path) -> None:
    codes = {
        "product.inner": "class Sum:\n    def total(self): return self._of(1)\n    def _of(self, it): return it",
        "product.outer": "from product import inner\ndef counted(given): return given.total()",
        "tests.helpers": "from product.outer import counted\nHELPS = [counted]",
        "tests.test_far": "from tests.helpers import HELPS\ndef test_far(): HELPS[0]\ndef test_other(): pass",
        "tests.test_near": "from product.inner import Sum\nclass TestSum:\n    def test_near(self): Sum().total()",
        "tests.test_none": "def test_none(): total()",
    }
    files = {name: tmp_path / f"{name.replace('.', '/')}.py" for name in codes}
    for name, code in codes.items():
        files[name].parent.mkdir(exist_ok=True)
        files[name].write_text(code, encoding="utf-8")
    found = Callers(files, tmp_path).distances("product/inner.py", "Sum._of")
    assert found == {("tests/test_near.py", "test_near"): 2, ("tests/test_far.py", "test_far"): 4}


def test_functions_say_that_they_run() -> None:
    def ran() -> list[str]:
        said = probe({_MUTANT.file})
        _is_cancelled()
        return sorted(name for _, _, name in said)

    assert forked(ran, cpu_s=60) == ["__contains__", "__init__"]


def test_a_mutant_is_what_a_process_imports(tmp_path: Path) -> None:
    ask = "from alignedserve.protocol.cancelled import CancelledAttempts; print(('a', 0) in CancelledAttempts())"
    for planted, said in ((environment(_MUTANT.plant(), tmp_path), "True\n"), ({}, "False\n")):
        asked = subprocess.run(
            [sys.executable, "-c", ask], cwd=SOURCE, env={**os.environ, **planted}, capture_output=True, text=True
        )
        assert asked.stdout == said


def test_code_that_occurs_twice_or_not_at_all_is_no_mutant() -> None:
    with pytest.raises(ValueError, match="occurs 0 times"):
        replace(_MUTANT, old="self._newest.get(request, 0)").plant()
    with pytest.raises(ValueError, match="occurs 6 times"):
        replace(_MUTANT, old="self._newest").plant()


def test_a_fork_that_computes_or_waits_for_ever_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    def start_and_spin() -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (tmp_path / "child").write_text(str(child.pid))
        while True:
            pass

    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(TakesTooLong):
        forked(start_and_spin, cpu_s=1)
    assert other.poll() is None
    other.kill()
    other.wait()
    assert not Path(f"/proc/{(tmp_path / 'child').read_text()}").exists()
    with pytest.raises(TakesTooLong):
        forked(signal.pause, cpu_s=60, idle_s=0.1)


def test_a_fork_that_crashes_is_no_answer() -> None:
    with pytest.raises(Crashed):
        forked(lambda: os._exit(3), cpu_s=60)


def _row(folder: str, killed: int, survived: int) -> Row:
    return Row(folder, 100, killed + survived, killed, 0, survived, 0, "abc")


def test_a_score_may_fall_by_a_point_in_the_folders_that_were_tried() -> None:
    published = Score({row.folder: row for row in (_row("router", 90, 10), _row("kernels/common", 0, 9))}, {}, 1)
    for killed, fell in ((89, False), (88, True)):
        now = Score({"router": _row("router", killed, 100 - killed)}, {}, 1)
        assert bool(falls(published, now)) is fell


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    first, second, third = draw(["router/members.py"], 3, seed=5)
    found = {first: Tried(KILLED, "a test"), second: Tried(SURVIVED, num_tests=3), third: Tried(TIMED_OUT)}
    score = Score({}, {}, 5).with_folder(*row_of("router", 1000, found))
    write(score, tmp_path / "score.md")
    assert read(tmp_path / "score.md") == score
    assert (score.rows["router"].survived, round(points(score.rows.values()) or 0)) == (1, 67)


def test_the_published_score_knows_every_core() -> None:
    assert set(filter(is_core, files_by_folder())) <= read().rows.keys()


def test_of_those_that_are_tried_again_the_found_ones_count_with_the_rest() -> None:
    """One that cannot be tried, since its code is another by now, goes on as a survivor."""
    lines = tuple(f"- `{name}`: passes 1 tests" for name in ("a", "b", "gone"))
    before = Score({"router": _row("router", killed=90, survived=3)}, {"router": lines}, 57)
    now = before.after(_row("router", killed=1, survived=1), ["- `b`: passes 9 tests"], {"a", "b"})
    assert now == (_row("router", killed=91, survived=2), ["- `b`: passes 9 tests", lines[2]])


def test_what_is_drawn_later_counts_with_the_rest() -> None:
    before = Score({"router": _row("router", killed=90, survived=1)}, {"router": ("- `a`: passes 1 tests",)}, 57)
    now = before.after(_row("router", killed=4, survived=1), ["- `b`: passes 9 tests"], {"b", "killed"})
    assert now == (_row("router", killed=94, survived=2), ["- `b`: passes 9 tests", "- `a`: passes 1 tests"])
    first = before.after(_row("kernels", killed=1, survived=0), [], {"c"})
    assert first == (_row("kernels", killed=1, survived=0), [])


def test_a_folder_that_is_gone_is_not_read(tmp_path: Path) -> None:
    survivors = {"router": ("- `router/a.py | b`: passes 1 tests",), "no/folder": ("- `no/folder/a.py | b`: passes 1",)}
    write(Score({name: _row(name, 1, 1) for name in survivors}, survivors, 57), tmp_path / "score.md")
    found = read(tmp_path / "score.md")
    assert [*found.rows, *found.survivors] == ["router", "router"]


def test_survivors_are_found_again_wherever_they_stand_in_their_files() -> None:
    drawn = draw([_MUTANT.file], 5, seed=3)
    survived = {"alignedserve/protocol": tuple(f"- `{mutant.name}`: passes 1 tests" for mutant in drawn[1:3])}
    again = Score({}, survived, 57).tried_again([_MUTANT.file])
    assert {mutant.name for mutant in again} == {mutant.name for mutant in drawn[1:3]}


def test_a_round_without_further_tests_changes_no_verdict() -> None:
    needs_a_process = ("", "", 2, ("a", "b"))
    assert after_round(None, needs_a_process) == needs_a_process
    assert after_round(needs_a_process, (SURVIVED, "", 0, ())) == needs_a_process
    assert after_round((SURVIVED, "", 3, ()), (SURVIVED, "", 0, ())) == (SURVIVED, "", 3, ())


def test_a_round_with_further_tests_counts_them() -> None:
    assert after_round((SURVIVED, "", 3, ()), (SURVIVED, "", 2, ())) == (SURVIVED, "", 5, ())
    assert after_round((SURVIVED, "", 3, ()), (KILLED, "a", 2, ())) == (KILLED, "a", 5, ())
