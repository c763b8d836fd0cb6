"""Measure what this machine has, and check that its memory is enough.

adapters.py   The adapters (LoRA) that a deployment begins with, and the memory for all that it serves.
capacity.py    How many block pairs and pages the given memory holds, and the longest request.
memory.py      Check that weights, KV and a step's work fit into memory before anything is loaded.
one_thread.py  One compute thread, for work that has one core.
processes.py   Processes that share a piece of work.
resources.py   The cores, the memory and the open files that this process may use of its machine or container.
safe_path.py   Keeps the working directory off the path on which Python finds modules.
whole_file.py  A file that is written beside its name and renamed: a reader finds all of it or none.
"""
