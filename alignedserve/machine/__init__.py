"""What this machine has, and files and threads on it; it knows no configuration.

energy.py        The energy of the device that a process computes on.
gpus.py          The memory and the use of GPUs, as their driver tells it.
resources.py     The cores, the memory and the open files that this process may use of its machine or container.
shared_files.py  Files in shared memory, and the locks that tell which processes live.
visible_gpus.py  The GPUs that torch sees, for a process of its own.
whole_file.py    Files that are there whole or not at all, and by one process at a time.
"""
