"""The KV pool: it owns the pages of the arena, and decides which waiting requests decode together.

actor.py          runs the pool as a process
batching.py       the search for requests of about one length (AlignedServe §3.3)
compression.py    which pages of waiting requests become int8, and when (ALISE §3.2)
grouping.py       the waiting requests, and which of them a decode worker gets next
holders.py        the entries that have each page
pages.py          the owners of pages: leases, entries, idle pages, names
quadtree.py       waiting requests by prefix length, in a quad-tree
reserve.py        the pages that best-effort requests keep from real-time ones
state.py          the pool's core
waiting_order.py  waiting requests by expected wait, for compression
"""
