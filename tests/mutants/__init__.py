"""Mutants: planted bugs that the fuzzer and the unit tests must kill (`python -m tests.mutants`).

mutant.py         What a mutant is.
of_owners.py      Mutants of owners, membership, and the job runner with its store.
of_pools.py       Mutants of the pool and the transport.
of_routers.py     Mutants of the router.
of_workers.py     Mutants of prefill and decode workers.
first_failure.py  Finds the first seed that fails, in a process of its own.
nearest.py        Orders unit tests by how near they are to a mutated file.
workshop.py       Plants mutants in a copy of the repository, and runs the unit tests and the fuzzer there.
results.py        The table of what kills which mutant; results.md holds the last one.
"""

from tests.mutants.mutant import Mutant
from tests.mutants.of_owners import JOBS, MEMBERSHIP, OWNER
from tests.mutants.of_pools import POOL, TRANSPORT
from tests.mutants.of_routers import ROUTER
from tests.mutants.of_workers import DECODE, PREFILL, SHARED_PAGES, WORKER

MUTANTS: tuple[Mutant, ...] = (
    *(*OWNER, *MEMBERSHIP, *ROUTER),
    *(*PREFILL, *DECODE, *WORKER, *SHARED_PAGES),
    *(*POOL, *JOBS, *TRANSPORT),
)
