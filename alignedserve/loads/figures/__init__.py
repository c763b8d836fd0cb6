"""Figures of requests, and how figures are written: of a load test and of a simulated run alike.

plotting.py         Makes and saves matplotlib's figures, where it is installed.
request_figures.py  Computes figures from the records of requests.
tables.py           Writes rows as text and as CSV, requests as rows, and numbers in their units.
"""
