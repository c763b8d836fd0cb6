"""Mutants: planted bugs that the tests must kill, written by hand or drawn at random (`python -m tests.mutants`).

planted.py        A change of a syntax tree, and the function that runs what was changed.
mutant.py         A mutant that was written by hand, found in the syntax tree by its code.
of_owners.py      Mutants of owners, membership, and the job runner with its store.
of_pools.py       Mutants of the pool and the transport.
of_routers.py     Mutants of the router.
of_workers.py     Mutants of prefill and decode workers.
operators.py      Every small change that can be drawn.
drawing.py        Draws from all folders by a seed.
equivalents.py    Drawn mutants that behave as the source does, with reasons.
callers.py        Finds the tests that may run a function, by who mentions it and who mentions those.
nearest.py        Orders test files by how near they are to a source file.
trying.py         Runs the tests that run a mutated function, in a fork for each mutant.
compiled.py       Mutants of the C++ kernels' dispatch, compiled and tried.
other_code.py     Gives functions that are loaded already the code of another syntax tree.
forked.py         Runs work in a child process that may hang or crash.
planting/         What brings a mutant into processes that import it.
first_failure.py  Finds the first seed of the fuzzer that fails, in a process of its own.
results.py        The table of what kills which mutant written by hand; results.md holds the last one.
score.py          The score of the drawn ones by folder; score.md holds the published one.
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
