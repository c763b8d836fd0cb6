"""Chats beside a batch job: `python -m benchmarks.isolation`, its documents being lines of a file.

    python -m benchmarks.batch_isolation [--seconds 30] [--rate 2] [--model FOLDER] [-- SERVE FLAGS]
    python -m benchmarks.batch_isolation --backend simulated [--seconds 60] [--off 0.04,0.12] [--seeds 0,1,2]

Chats, documents, promises and goals are those of benchmarks/isolation.py. There as many best-effort requests as --be
are always open; here a file has more lines than can be done, and the job runner opens as many as it sees room for.
Whether it is the job runner that leaves a batch little beside chats, say the simulated runs of both: `isolation
--backend simulated --be 8`, the same with 32, and this.
"""

from __future__ import annotations

from benchmarks.isolation import main

if __name__ == "__main__":
    main(__doc__, is_batch=True)
