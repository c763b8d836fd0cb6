"""Measure chats beside a batch job: like `python -m benchmarks.isolation`, but the documents are lines of a file.

    python -m benchmarks.batch_isolation [--seconds 30] [--rate 2] [--model FOLDER] [-- SERVE FLAGS]
    python -m benchmarks.batch_isolation --backend simulated [--seconds 60] [--off 0.04,0.12] [--seeds 0,1,2]

Chats, documents, promises and goals are those of benchmarks/isolation.py. There, `--be` best-effort requests are always
open; here, a file has more lines than the run can finish, and the job runner opens as many as it sees room for. If a
batch gets little beside chats, simulated runs tell whether the job runner is the reason: compare `isolation --backend
simulated --be 8`, the same with 32, and this benchmark.
"""

from __future__ import annotations

from benchmarks.isolation import main

if __name__ == "__main__":
    main(__doc__, is_batch=True)
