"""Schedulers of other systems, by the papers that describe them: compared with ours, on real workers and simulated.

The product finds them by name (`schedule.scheduler`, `--preset`), imports none of them, and runs without this package.

accelgen.py   AccelGen by its own formulas.
alise.py      ALISE: by predicted levels; requests of lower levels are swapped out.
apt_serve.py  Apt-Serve: before each step, Apt-Serve chooses which requests have memory.
best_fit.py   Ours, with the best fit of prompts to the tokens and the memory left (AccelGen §4.4).
bros.py       BROS: our rules, with chats by the slack of all their work.
fastserve.py  By levels of service, without predictions: MLFQ, and FastServe.
fcfs.py       First come, first served: Orca, vLLM, Sarathi-Serve, DistServe, AlignedServe's paper, TGI, round robin.
in_order.py   By a fixed order within the time of a step.
memory/       Memories that share blocks (BROS), or keep requests as hidden vectors (Apt-Serve).
names.py      The name of each scheduler, ours among them.
orders.py     The orders in which only these schedulers serve requests.
policy.py     The options that only these schedulers read.
presets.py    These systems as settings.
rules.py      What other parts know of these schedulers; it loads none of their code.
table.py      Which class plans steps under which name.
wrapping.py   Schedulers that wrap another: prompts that are never cut, an ablation.
"""
