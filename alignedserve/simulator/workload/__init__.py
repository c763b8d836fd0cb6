"""Workloads of simulated runs and load tests.

amounts.py  Draws amounts, such as tokens of a prompt or seconds of a deadline.
build.py    Builds a `Mixture` from a tree of plain values.
files.py    Reads CSV files of requests.
lengths.py  Draws the lengths of prompts and outputs.
load.py     Defines a workload, and follows one under way.
named.py    Lists the workloads that have a name.
pace.py     Says when visits begin: a request, or a conversation of several.
spec.py     Reads a workload from text or a file.
stream.py   Defines a stream: users of one kind, and what they ask for.
tape.py     Draws words of prompts from one long tape of tokens.
visit.py    Defines a user's visit: one request, or the turns of a conversation.
"""

from alignedserve.simulator.workload.load import Load, Mixture, Workload, arrivals
from alignedserve.simulator.workload.visit import Arrival

__all__ = ["Arrival", "Load", "Mixture", "Workload", "arrivals"]
