"""The code that commands share: flags, and the first process of a container.

arguments.py      types of flags' values with errors that say what is wanted; checks which flags go together
first_process.py  is the first process of a container, and runs the command in another
"""
