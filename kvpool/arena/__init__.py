"""The arena: the pool's memory on one node, in a file that every worker of the node maps.

arena.py         the file, its page headers, and reads that notice any change
extents.py       kinds of pages, and how the arena is divided among them
numa.py          the NUMA node that the arena's memory comes from
shared_files.py  files in shared memory, and the locks that tell which processes live
"""
