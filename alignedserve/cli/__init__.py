"""The command line: one file per command (in remote/ those that talk to a server); flags import nothing heavy.

benching.py       the flags of bench
clients.py        the flags of chat, status, explain, stop, scale, batch and store
doctor.py         `alignedserve doctor`: what this machine has for serving, what it lacks, and how to get that
fuzz.py           `alignedserve fuzz`: injects faults into simulated deployments and checks their invariants
main.py           the entry: parses the command line, runs the command, reports errors in one line
plan.py           `alignedserve plan`: finds the cheapest deployment that keeps its promises
plan_settings.py  writes the settings that start the deployment of a plan
planning.py       the flags of plan
profile.py        `alignedserve profile`: measures what steps take here, and writes the cost model
reproduce.py      `alignedserve reproduce`: runs the figures of papers, and writes them beside what the papers say
serving.py        the flags of serve, presets, key, doctor and profile; prints the configuration
simulate.py       `alignedserve simulate`: runs workloads in virtual time, prints and writes the figures
simulating.py     the flags of simulate, reproduce and fuzz
store.py          `alignedserve store`: checks the store of files and jobs, and exports its records
"""
