"""A deployment on Ray ends, whatever call to Ray does not return."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.launch.failing import NUM_FAILURES
from tests.rare import thinned

SOON_S = 20.0  # on a slow machine too
NEVER_S = 10 * SOON_S


@pytest.mark.parametrize(
    ("call", "signals", "end_s"),
    thinned(
        [("get", 1, 3.0), ("shutdown", 1, 3.0), ("kill", 2, NEVER_S), ("util.remove_placement_group", 2, NEVER_S)],
        usual=2,
    ),
)
def test_it_ends_whatever_does_not_return(call: str, signals: int, end_s: float) -> None:
    command = [sys.executable, "-m", "tests.launch.hanging", call, str(end_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "serves\n", launcher.communicate()
            launcher.send_signal(signal.SIGINT)
            assert launcher.stdout.readline() == "hangs\n", launcher.communicate()
            for _ in range(signals - 1):
                launcher.send_signal(signal.SIGTERM)
            _, said = launcher.communicate(timeout=SOON_S)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, "it was told to stop"
    assert said.splitlines()[-1] == (
        "alignedserve: the end hangs in hang: the launcher ends now, and leaves to Ray what may still run: "
        "decode-0, gateway-0, jobs-0, pool-0, prefill-0, router"
    )


def test_an_error_of_ray_is_a_death_of_its_part_and_ends_nothing_else() -> None:
    command = [sys.executable, "-m", "tests.launch.failing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("decode-0 cannot be started: RuntimeError: Ray does not answer") == NUM_FAILURES
    assert "decode-0 does not stay up: it is started again in" in done.stderr
