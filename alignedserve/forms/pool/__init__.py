"""The pool's pages of waiting requests in int8, which take about half of the room (ALISE §3.2).

worker_part.py    A worker's part, which compresses pages beside the steps.
"""
