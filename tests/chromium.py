"""A Chromium for the tests that need one."""

from __future__ import annotations

import os
import subprocess
from functools import cache

import pytest

from tests import browser


def program() -> tuple[str, dict[str, str]]:
    """Return the browser and its environment; skip the test where there is none, or fail it in CI."""
    if (found := browser.find()) is None:
        why = "there is no Chromium: `make chromium` gets Debian's where apt-get may"
    elif not (why := _what_it_lacks()):
        return found
    if os.environ.get("ALIGNED_TESTS_NEED_CHROMIUM"):
        pytest.fail(why)
    pytest.skip(why)


@cache
def _what_it_lacks() -> str:
    """Return why the browser cannot run here, such as a library that is missing."""
    found = browser.find()
    assert found is not None
    command, env = found
    tried = subprocess.run([command, "--version"], env=env, capture_output=True, text=True, timeout=60, check=False)
    return "" if tried.returncode == 0 else f"Chromium does not run: {tried.stderr.strip()}"
