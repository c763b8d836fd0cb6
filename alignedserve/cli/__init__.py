"""The command line: one file per command.

batch.py          `alignedserve batch`: batch jobs on any server that has OpenAI's files and batches.
chat.py           A chat in the terminal with any server that has an OpenAI-compatible HTTP API.
clients.py        What the commands take that talk to a server, or look after what it keeps.
doctor.py         What this machine has for serving and what it lacks, with how to get it.
fuzz.py           `alignedserve fuzz`: faults from seeds, in simulated deployments whose invariants are
main.py           The command line. What a command needs is imported when it runs, so that --help answers at once.
profile.py        `alignedserve profile`: measures what steps take on this machine, and says how well the cost
profile_plot.py   Draw predicted against measured step times: one dot per step.
serving.py        What `alignedserve serve`, `presets`, `key`, `doctor` and `profile` take.
simulate.py       `alignedserve simulate`: runs a workload through a deployment in virtual time, and says what
simulate_once.py  `run_once(trial, on_progress) -> RunRecord`: the one place that knows how a trial becomes a
simulating.py     What `alignedserve simulate` and `fuzz` take. What a command needs is imported when it runs.
status.py         `alignedserve status`: what a deployment consists of, where its parts run, and what is open,
store.py          `alignedserve store`: is what is kept of files and jobs sound, and all of it in one file.
"""
