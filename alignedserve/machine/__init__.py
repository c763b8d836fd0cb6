"""What this machine has, and how far its memory goes.

capacity.py    How far the memory that was given goes: pairs, pages and the longest request.
memory.py      Whether weights, KV and a step's work fit into the memory that is there, before anything is loaded.
resources.py   What this machine, or the container, lets this process have of cores and memory.
whole_file.py  A file that is written beside its name and renamed: who reads it finds all of it, or what was
"""
