"""The requests that are on a decode worker: stores with one owner for each fact, which decide nothing.

occupancy.py     Residents, prompts, and requests that join or have ended: which requests occupy a decode worker.
candidates.py    The requests that join as soon as there is room: candidate requests, then the candidate batch.
lengths.py       The requests by their lengths, as the live page shows them.
line.py          The line of candidate requests: the order in which they join, and how long each has to wait.
serving_order.py The order in which requests here are served, and in which they leave for others.
transfers.py     Transfers of KV from prefill workers to this one.
departures.py    Requests that leave for a prefill worker; each has its pairs until it is sent.
step_counts.py   How many steps had members of how many batches, how far apart their prefixes were, what sat them out.
band.py          The batch that runs, and which requests are about as long as its members (AlignedServe §3.4).
"""
