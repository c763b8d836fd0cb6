"""The KV pool: who owns which page, which requests wait, and which are batched next.

actor.py          The KV pool as a process: its core, and the arena that it makes and takes away again.
batching.py       Which waiting requests decode together: Density First Search, sliding, widening
compression.py    Which pages of those who wait become int8, and when (ALISE §3.2).
grouping.py       Which of the waiting entries a decode worker gets next: one verb, two ways.
holders.py        Which entries have which page, and how many pages each class has.
pages.py          Who owns which page of the arena: page numbers only, the bytes are the workers' business.
quadtree.py       The waiting requests of a pool, by prefix length: a quad-tree over 1..65,536 in flat arrays
reserve.py        What best-effort requests keep from real-time ones, which some pages are reserved for.
segmented_lru.py  Which idle page is evicted next (segmented LRU).
state.py          The pool's core: which pages are whose, and which waiting requests a decode worker gets next.
waiting_order.py  The order in which requests wait in the pool: the request with the longest expected wait is
"""
