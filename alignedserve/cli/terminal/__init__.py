"""The code that commands share: flags, progress bars and Ctrl-C.

arguments.py      types of flags' values with errors that say what is wanted; checks which flags go together
first_process.py  is the first process of a container, and runs the command in another
interrupt.py      ends the process at Ctrl-C while modules are imported
progress.py       a progress bar on one line of a terminal, and notes
"""
