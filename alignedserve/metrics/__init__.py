"""Metrics in Prometheus' format, under the names that vLLM's users know.

series.py       Metrics of one process, their text form, and how the texts of several parts merge.
requests.py     The requests that this process owns: a gateway's, and the job runner's lines, and their kept promises.
meter.py        Measures one request from arrival to end.
recent.py      An owner's requests of the last 15 minutes, for the live page.
parts.py        What workers, pools and the router told last of themselves.
part_tables.py  The names of these metrics, and how each is read.
"""
