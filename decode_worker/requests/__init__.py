"""The requests that are on a decode worker: stores with one owner for each fact, which decide nothing.

occupancy.py     Which requests occupy a decode worker: residents, prompts, and requests on their way in or out.
candidates.py    The requests that join as soon as there is room: candidate requests, then the candidate batch.
serving_order.py The order in which candidates join; the batch that runs (AlignedServe §3.4).
"""
