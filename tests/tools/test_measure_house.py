"""The figures of tools/measure_house.py on a small repository, and its count of settings on this one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alignedserve.config.config import every_setting, settings
from measure_house import EXPERIMENT, GENERATED, HERE, SETTINGS, House, main

DOCS = "docs"
FILES = {
    "README.md": "# Small\n\nAligned.\n",
    f"{DOCS}/page.md": "three words here\n",
    "alignedserve/__init__.py": "",
    "alignedserve/bases.py": "class Base:\n    def hear(self):\n\n        pass\n\nclass _Line: ...\n",
    "alignedserve/config.py": "class ScheduleConfig:\n    order: str = setting('fcfs', 'the order')\n",
    "router/__init__.py": "",
    "router/state.py": "from alignedserve.bases import Base as Kind\nclass Middle(Kind): ...\nclass Core(Middle): ...",
    "router/line.py": "class Line: ...\n",
    "tests/test_line.py": "class Line: ...\n",
}


@pytest.fixture
def house(tmp_path: Path) -> House:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "alignedserve" / "router").symlink_to("../router")
    return House(tmp_path)


def test_a_small_house(house: House) -> None:
    assert house.function_sizes() == [3]
    assert house.deepest_class() == ["Core", "Middle", "Base"]
    assert (house.flat_modules(), house.largest_folder()) == (2, (2, Path("router")))
    assert house.colliding_names() == {"Line": ["alignedserve/bases.py", "router/line.py"]}
    assert (house.settings(*SETTINGS).total(), house.readme_lines(), house.words("docs")) == (1, 3, (1, 3))
    assert house.class_names() == 6
    assert house.closure("alignedserve.router.state") == {"alignedserve.router.state", "alignedserve.bases"}
    assert house.subsystems() == {"alignedserve": (3, 6), "router": (3, 4)}


def test_a_field_of_a_request_has_one_writer(house: House) -> None:
    files = {
        "request.py": "class WorkerRequest:\n    prefix: int\n    batch: int\n    def ran(self): self.prefix += 1\n",
        "owners.py": "running.prefix, running.batch = 3, 1\nclass Batch:\n    def begin(self): self.prefix = 2\n",
    }
    (house.root / "alignedserve" / "worker").mkdir()
    for name, text in files.items():
        (house.root / "alignedserve" / "worker" / name).write_text(text)
    assert house.written_by_several() == {"prefix": [f"alignedserve/worker/{name}" for name in sorted(files)]}


def test_words_to_read_are_without_notebook_and_generated_pages(house: House) -> None:
    for name in ("notebook/figures.md", "reference/settings.md"):
        (house.root / DOCS / name).parent.mkdir(exist_ok=True)
        (house.root / DOCS / name).write_text("not counted\n")
    (house.root / DOCS / "reference" / "table.md").write_text("| one | 2 |\n|---|---|\n")
    assert (house.words(DOCS)[0], house.words_to_read(DOCS)) == (4, (2, 4))


def test_generated_pages_exist() -> None:
    assert [name for name in GENERATED if not (HERE / DOCS / f"{name}.md").is_file()] == []


def test_the_settings_of_this_repository_are_all_seen() -> None:
    house = House(HERE)
    assert house.settings(*SETTINGS).total() == len(settings())
    assert house.settings(*SETTINGS, EXPERIMENT).total() == len(every_setting())


def test_the_table_is_printed(
    house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (house.root / "router" / "more.py").write_text("def more():\n    return 1\n\n\nkv.folded = []\n")
    monkeypatch.setattr("sys.argv", ["measure_house.py", "--list", "--at", str(house.root)])
    main()
    said = capsys.readouterr().out
    assert re.search(r"^their lines, median / p90 / max +2 / ", said, re.M)
    assert "\nLine: alignedserve/bases.py router/line.py\n" in said
    assert said.endswith("\nwindows and folding: router/more.py\n\n")
