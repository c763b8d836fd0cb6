"""The job runner: it runs the lines of batch jobs.

actor.py       The job runner as a process: the core on an event loop, the owner of its requests in a thread
answering.py   A line's body becomes its answer, as a request over HTTP would have got it.
assembling.py  A job's results become its files. Done again after a crash, they are other files with the same
exchange.py    What passes between the job runner's core and its shell: facts in the past tense, orders in the
lines.py       The lines of a job's file: read, checked, found again; and what is written of each.
places.py      Where the lines of a file are that still have to run: 16 bytes for each, as every open job has
rate.py        How fast something goes: tokens in a second, of the last half minute or so.
shares.py      Who gets how much, of several jobs: first what each needs to be through in time, then by weight.
state.py       The job runner's core: which lines of which jobs run now, and what becomes of the jobs.
window.py      How many lines may be open at once: as many as the system has room for, as far as that can be
"""
