"""Workloads of simulated runs and load tests.

amounts.py      Draws amounts, such as the tokens of a prompt or the seconds of a deadline.
block_trace.py  Reads traces whose prompts share blocks, in Mooncake's format.
build.py        Builds a `Mixture` from a tree of plain values.
chats.py        Reads files of chats: their texts, and the lengths of these.
files.py        Reads tables of requests: CSV files, or rows.
lengths.py      Draws the lengths of prompts and outputs.
load.py         Defines a workload, and runs it: hears of its requests and says which arrive next.
named.py        Holds the workloads that have a name.
pace.py         Decides when visits begin; a visit is a request or a conversation.
predictions.py  Draws predictions as wrong as those of real predictors.
spec.py         Reads a workload from text or a file.
stream.py       Defines a stream: users of a kind, and the requests that they send.
table.py        Builds a workload of a table in Python: rows, columns, or a dataframe.
tape.py         Draws the tokens of prompts from a long tape of random tokens.
visit.py        Defines a user's visit: a request, or the turns of a conversation.
windows.py      Varies a trace by the seed: draws windows of it.
"""

from alignedserve.loads.workload.load import Load, Mixture, Workload, arrivals
from alignedserve.loads.workload.visit import Arrival

__all__ = ["Arrival", "Load", "Mixture", "Workload", "arrivals"]
