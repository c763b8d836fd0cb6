"""What a worker's core is made of, whether requests decode there or not: the requests, the memory, the pool, the pace.

setup.py        What a worker's core is made with, and how it takes a request in.
scheduler.py    The interface of a scheduler, which plans the steps of one worker.
caller_shares.py  Makes requests beyond a caller's part of a worker give way.
part.py         What parts have in common: the verbs that concern all of them.
requests.py     The requests on a worker by their states: the one place that takes a request from state to state.
candidates.py   The requests that join as soon as there is room, and the batch that runs (AlignedServe §3.4).
arriving.py     Requests that come: prompts, predicted lengths, what the pool has of prompts, the queue for seats.
prompt_queue.py  The prompts that wait for a seat.
steps.py        How long waiting prompts will take, by the steps before, and trials while the worker is idle.
in_flight.py    The ordered steps that have not ended: one; or two where a step is planned ahead, or runs in a pause of
                another.
pace.py         How fast a worker is: the time of steps, the size of chunks, the tokens of a step; chats to come.
memory.py       The memory of a worker's device, behind one interface: which requests get and give back blocks.
windows.py      KV that layers with windows no longer read: given back, or folded.
log.py          What happens on a worker, noted for the router, the metrics and the story of a request.
pool.py         The pool as a worker knows it: the pages that it keeps for requests, leased pages, copies to them.
offering.py     Offers of requests to other workers, which pull the KV directly.
owners.py       Emitted tokens: sent to the owners once a step, kept until the owners have them.
reporting.py    What a worker tells the router: requests that moved on, the work that is left, figures for metrics.
"""
