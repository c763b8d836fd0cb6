"""The figures of tools/measure_house.py on a small repository, and its count of settings on this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from alignedserve.config.config import every_setting, settings
from measure_house import EXPERIMENT, HERE, SETTINGS, House

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
    lines = house.code_lines()
    assert (lines["alignedserve"], lines["router"], sum(lines.values())) == (6, 4, 10)


def test_the_settings_of_this_repository_are_all_seen() -> None:
    house = House(HERE)
    assert house.settings(*SETTINGS).total() == len(settings())
    assert house.settings(*SETTINGS, EXPERIMENT).total() == len(every_setting())


def test_the_table_is_printed() -> None:
    script = HERE / "tools" / "measure_house.py"
    done = subprocess.run([sys.executable, script, "--list"], capture_output=True, text=True, check=True)
    assert "their lines, median / p90 / max" in done.stdout
