"""The owners of the pool's pages: only page numbers are here; workers read and write the bytes.

pages.py      Leases, entries, idle pages and names; the pages that are reserved for real-time requests.
rewriting.py  The interface of forms in which pages are written again while requests wait.
"""
