"""What forms add to a worker's core.

table.py  Which memory, and which parts, a core has by its policy.
"""
