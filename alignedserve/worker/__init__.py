"""What a worker's core is made of, whether requests decode there or not: the requests, the memory, the pool, the pace.

setup.py        What a worker's core is made with, and how it takes a request in.
caller_shares.py  Lets requests yield that are beyond their caller's part of a worker.
part.py         What parts have in common: the verbs that concern all of them.
requests.py     The requests on a worker by their states: the one place that takes a request from state to state.
candidates.py   The requests that join as soon as there is room, and the batch that runs (AlignedServe §3.4).
transfers.py    Requests whose KV goes from one worker to another: what is on its way here, and what leaves.
arriving.py     Requests that come: prompts and their predictions, what the pool has of them, the queue for seats.
steps.py        How long waiting prompts will take, by the steps before, and trials while the worker is idle.
in_flight.py    The steps that a worker has ordered and not heard the end of: one, or two where one is planned ahead.
pace.py         How fast a worker is: the time of steps, the size of chunks, the tokens of a step; chats to come.
memory.py       The memory of a worker's device, behind one interface: who gets blocks, and who gives them back.
seating.py      The memory and the seats that a step may offer where real-time requests come first.
windows.py      KV that layers with windows no longer read: given back, or folded.
log.py          What happens on a worker, noted for the router, the metrics and the story of a request.
pool.py         The pool as a worker knows it: the pages that it keeps for requests, leased pages, copies to them.
offering.py     Requests whose KV goes directly to another worker, which pulls it.
owners.py       What a worker has emitted: sent to the owners once a step, kept until they have it.
reporting.py    What a worker tells the router: requests that moved on, the work that is left, figures for metrics.
"""
