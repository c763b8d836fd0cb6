"""The command line: one file per command, and the flags of each in a file that imports nothing heavy.

batch.py          `alignedserve batch`: batch jobs on any server that has OpenAI's files and batches
chat.py           `alignedserve chat`: a chat in the terminal with any OpenAI-compatible server
clients.py        the flags of chat, status, stop, scale, batch and store
doctor.py         `alignedserve doctor`: what this machine has for serving, what it lacks, and how to get that
fuzz.py           `alignedserve fuzz`: injects faults into simulated deployments and checks their invariants
main.py           the entry: parses the command line, runs the command, reports errors in one line
profile.py        `alignedserve profile`: measures what steps take here, and writes the cost model
serving.py        the flags of serve, presets, key, doctor and profile; prints the configuration
simulate.py       `alignedserve simulate`: runs workloads in virtual time, prints and writes the figures
simulate_once.py  turns what users write (preset, workload, cluster, profile) into one simulated run
simulating.py     the flags of simulate and fuzz
status.py         `alignedserve status`: a deployment's parts, their nodes, and the open requests
store.py          `alignedserve store`: checks the store of files and jobs, and exports its records
"""
