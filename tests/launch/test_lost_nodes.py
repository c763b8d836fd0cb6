"""A part on Ray ends with the server of its node, which is its process's parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

LIMIT_S = 30.0
# A server of a node that starts a part; the part stands still, and ends by nothing else.
PART = """
import time
from alignedserve.launch.start import end_with_parent
end_with_parent()
print("there", flush=True)
time.sleep(600)
"""
NODE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PART!r}])"


def test_a_part_ends_when_the_server_of_its_node_is_killed() -> None:
    """Its end is seen by that of its output: as an orphan it has another parent."""
    with subprocess.Popen([sys.executable, "-c", NODE], stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == b"there\n"
        os.kill(node.pid, signal.SIGKILL)
        there, _, _ = select.select([node.stdout], [], [], LIMIT_S)
        assert there, "the part lives on"
        assert not node.stdout.read()
