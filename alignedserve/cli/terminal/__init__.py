"""The code that commands share: flags, progress bars, processes and Ctrl-C.

arguments.py  types of flags' values with errors that say what is wanted; checks which flags go together
interrupt.py  ends the process at Ctrl-C while modules are imported
processes.py  processes that share a command's work
progress.py   a progress bar on one line of a terminal, and notes
"""
