"""The pool's pages of waiting requests in int8, which take about half of the room (ALISE §3.2).

pages.py          The owners of pages of two kinds, and what compression may take.
compression.py    Which pages of waiting requests become int8, and when: orders to workers.
waiting_order.py  Waiting requests by expected wait: the longest is compressed first.
worker_part.py    A worker's part, which compresses pages beside the steps.
int8_layout.py    The layout of a compressed page.
table.py          Which pages a pool has by its policy and its extents.
"""
