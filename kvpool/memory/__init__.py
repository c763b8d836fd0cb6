"""The owners of the pool's pages: only page numbers are here; workers read and write the bytes.

pages.py      Leases, entries, idle pages and names; the pages that are reserved for real-time requests.
compression.py     Which pages of waiting requests become int8, and when: orders to workers.
pages_of_kinds.py  The owners of pages of two kinds, and what compression may take.
"""
