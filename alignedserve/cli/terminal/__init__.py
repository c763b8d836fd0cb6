"""What commands share: flags, progress bars and Ctrl-C.

arguments.py  What flags take: numbers, lists and files, refused in words that say what is wanted; and which
interrupt.py  Ctrl-C while modules are imported: nothing is begun that wants an order, and a traceback would
progress.py   A progress bar on one line of a terminal, and notes; where there is no terminal, notes alone.
"""
