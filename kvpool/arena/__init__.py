"""The pool's memory: the arena in shared memory and how it is laid out.

arena.py         The arena: the pool's memory on one node, one file that every worker of the node maps.
extents.py       What a page may hold, and how the arena is divided among pages of several kinds.
int8_layout.py   How a page of kind KV_INT8 is laid out: KV with a byte for each number, and two numbers for
numa.py          On which NUMA node memory is to lie that a device and its workers share.
shared_files.py  Files in shared memory that several processes map, and who holds them.
"""
