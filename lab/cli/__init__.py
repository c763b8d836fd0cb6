"""The lab's commands: one file per command; flags import nothing heavy.

bench.py          `alignedserve bench`: puts a load on any OpenAI-compatible server, and measures what it gives
commands.py       adds the flags of each command, and runs it
flags.py          the flags of these commands, each declared once
fuzz.py           `alignedserve fuzz`: injects faults into simulated deployments and checks their invariants
plan.py           `alignedserve plan`: finds the cheapest deployment that keeps its promises
promise.py        `alignedserve promise`: shows what people get who ask at once, for each length of prompt
reproduce.py      `alignedserve reproduce`: runs the figures of papers, and writes them beside what the papers say
simulate.py       `alignedserve simulate`: runs workloads in virtual time, prints and writes the figures
"""
