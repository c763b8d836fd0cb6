"""The requests that are on a decode worker: stores with one owner for each fact, which decide nothing.

occupancy.py     Which requests are here or on their way in or out, and the order in which candidates join.
candidates.py    The requests that join as soon as there is room, and the batch that runs (AlignedServe §3.4).
"""
