"""The parts that forms add to a worker's core.

table.py  Which parts a core has by its policy.
"""
