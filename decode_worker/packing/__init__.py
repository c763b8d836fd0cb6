"""How a decode worker packs a step: one file for each kind of packing, and the table of all of them (table.py)."""
