"""How a worker chooses what its next step runs.

chunks.py     Which prompt tokens run in a step. First come, first served.
coming.py     Real-time requests that are still to come: a step that has just begun must not cost them their
filling.py    A step that is being put together: who fits into what is left of its time, its tokens and memory.
limits.py     What a step may take: R, which the tightest real-time request leaves for it, and the budget of
ranks.py      Those that are seated, in the order in which a step serves them (slo.Standing).
running.py    A request on a worker, the block pairs that it takes there, and what the worker may take in all.
seated.py     Decodes that are seated, more of them than a step has places for, kept in the order in which
seating.py    What a choice may take of a device: block pairs, and seats for requests that wait.
selection.py  Which decodes and prompt chunks run in a step: those whose promises are most urgent, as far as
waiting.py    Prompts that wait for room on a worker, kept in the order in which they are to be served.
windows.py    Which prompt best fills what is left of a step (AccelGen §4.4): nearest in compute and memory
"""
