"""The arena: the pool's memory on one node, in a file that every worker of the node maps.

arena.py         the file, its page headers, and reads that notice any change
numa.py          the NUMA node that the arena's memory comes from
"""
