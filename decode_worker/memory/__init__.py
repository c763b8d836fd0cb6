"""The memory of a decode worker's device, behind one interface (plain.py): plain, shared, or hybrid."""
