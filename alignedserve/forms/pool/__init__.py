"""The pool's pages of waiting requests in int8, which take about half of the room (ALISE §3.2).

pages.py          The owners of pages of two kinds, and what compression may take.
compression.py    Which pages of waiting requests become int8, and when: orders to workers.
worker_part.py    A worker's part, which compresses pages beside the steps.
int8_layout.py    The layout of a compressed page.
"""
