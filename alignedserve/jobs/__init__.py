"""The job runner: it runs the lines of batch jobs.

actor.py       Runs the job runner as a process: its core on an event loop, the owner of its requests in a thread.
answering.py   Answers a line of a job as a request over HTTP would be answered.
assembling.py  Writes the files of a job from its results.
lines.py       Reads and checks the lines of a job's file, and writes the lines of its output and error files.
messages.py    The messages between the job runner's core and its shell.
metrics.py     The metrics of jobs and of their lines.
open_lines.py  Notes which lines are open, so that one that ends the job runner is found.
rate.py        Measures a rate, such as tokens per second, over about the last half minute.
shares.py      Divides the system among jobs: first what each needs to end in time, then the rest by weight.
state.py       The job runner's core: decides which lines run now, and moves jobs through their states.
window.py      Decides how many lines may be open at once.
"""
