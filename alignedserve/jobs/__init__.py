"""The job runner: it runs the lines of batch jobs.

actor.py       Runs the job runner as a process: its core on an event loop, the owner of its requests in a thread.
answering.py   Answers a line of a job as a request over HTTP would be answered.
lines.py       Reads and checks the lines of a job's file, and writes its output and error files.
messages.py    The messages between the job runner's core and its shell.
metrics.py     The metrics of jobs and of their lines.
open_lines.py  Notes which lines are open, so that one that ends the job runner is found.
shares.py      How many lines may be open, by the measured rate, and how jobs share the system.
state.py       The job runner's core: decides which lines run now, and moves jobs through their states.
"""
