"""Workloads of simulated runs and load tests.

amounts.py  How much of something, drawn anew each time: tokens of a prompt, turns of a conversation, seconds
build.py    A `Mixture` from a tree of plain values.
files.py    Reads CSV files of requests: `arrival_s,prompt_tokens,output_tokens`, and other columns that are
lengths.py  How long prompts and outputs are, in tokens.
load.py     A workload, and a workload under way.
named.py    Workloads that need no file, written as in one.
pace.py     When visits begin. (A visit is a request, or a conversation of several.)
spec.py     A workload from text: a stream on the command line, a workload that has a name, or a file of streams.
stream.py   A stream: users of one kind, and what they ask for.
tape.py     Words for prompts: pieces of one long tape of random tokens, so that a long prompt costs no more
visit.py    A visit of one user: a request, or a conversation of several, one after the other.
"""

from alignedserve.simulator.workload.load import Load, Mixture, Workload, arrivals
from alignedserve.simulator.workload.visit import Arrival

__all__ = ["Arrival", "Load", "Mixture", "Workload", "arrivals"]
