"""The KV pool: it owns the pages of the arena, and decides which waiting requests decode together.

actor.py          runs the pool as a process
batching.py       the search for requests of about one length (AlignedServe §3.3)
grouping.py       the waiting requests, and which of them a decode worker gets next
quadtree.py       waiting requests by prefix length, in a quad-tree
state.py          the pool's core

The owners of pages are in memory/, the memory itself in arena/.
"""
