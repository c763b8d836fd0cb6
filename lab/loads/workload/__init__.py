"""Workloads of simulated runs and load tests.

amounts.py      Draws amounts: the tokens of prompts and outputs, the seconds of a deadline.
block_trace.py  Reads traces whose prompts share blocks, in Mooncake's format.
build.py        Builds a `Mixture` from a tree of plain values.
files.py        Reads files of requests: CSV, or rows; and chats with their texts.
load.py         Defines a workload, and runs it: hears of its requests and says which arrive next.
pace.py         Decides when visits begin; a visit is a request or a conversation.
spec.py         Reads a workload from text or a file; holds those that have a name.
stream.py       Defines a stream: users of a kind, and the requests that they send.
table.py        Builds a workload of a table in Python: rows, columns, or a dataframe.
tape.py         Draws the tokens of prompts from a long tape of random tokens.
windows.py      Varies a trace by the seed: draws windows of it.
"""

from alignedserve.lab.loads.workload.load import Arrival, Load, Mixture, Workload, arrivals

__all__ = ["Arrival", "Load", "Mixture", "Workload", "arrivals"]
