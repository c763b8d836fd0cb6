"""The figures of tools/measure_house.py on a small repository, and its count of settings on this one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alignedserve.config.config import every_setting, settings
from measure_house import EXPERIMENT, HERE, SETTINGS, House, main

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


def test_the_settings_of_this_repository_are_all_seen() -> None:
    house = House(HERE)
    assert house.settings(*SETTINGS).total() == len(settings())
    assert house.settings(*SETTINGS, EXPERIMENT).total() == len(every_setting())


def test_the_table_is_printed(
    house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (house.root / "router" / "more.py").write_text("def more():\n    return 1\n")
    monkeypatch.setattr("sys.argv", ["measure_house.py", "--list", "--at", str(house.root)])
    main()
    said = capsys.readouterr().out
    assert re.search(r"^their lines, median / p90 / max +2 / ", said, re.M)
    assert said.endswith("\nLine: alignedserve/bases.py router/line.py\n")


def test_growth_beyond_a_measure_is_told(
    house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["measure_house.py", "--warn", "--at", str(house.root)])
    main()
    assert capsys.readouterr().out == ""
    (house.root / "README.md").write_text("A line.\n" * 111)
    for number in range(16):
        (house.root / "router" / f"more{number}.py").write_text("")
    main()
    said = capsys.readouterr().out.splitlines()
    assert said == ["warning: 111 lines of README.md, of at most 110", "warning: 19 files in router, of at most 17"]
