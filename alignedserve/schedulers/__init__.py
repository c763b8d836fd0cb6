"""Schedulers: objects that plan the steps of a worker.

aligned.py      The default: chats in time, documents in all that chats leave. Begin here.
near_lengths.py Which decodes of documents share a step (AlignedServe §3.3).
scheduler.py    The interface of a scheduler.
table.py        Which scheduler a policy means.
best_fit.py     The default, with the best fit of prompts to the tokens and the memory left (AccelGen §4.4).
bros.py         BROS: the default's rules, with chats by the slack of all their work.
accelgen.py     AccelGen by its own formulas.
in_order.py     By a fixed order within the time of a step.
alise.py        ALISE: by predicted levels; requests of lower levels are swapped out.
fcfs.py         First come, first served: Orca, vLLM, Sarathi-Serve, DistServe, AlignedServe's paper, TGI, round robin.
fastserve.py    By levels of service, without predictions: MLFQ, and FastServe.
wrapping.py     Schedulers that wrap another: prompts that are never cut, an ablation.
custom.py       Guards a user's own scheduler: what cannot run, the default plans.
apt_serve.py    Apt-Serve: before each step, Apt-Serve chooses which requests have memory.
"""
