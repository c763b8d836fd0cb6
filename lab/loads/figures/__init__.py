"""Figures of requests, and how figures are written: of a load test and of a simulated run alike.

request_figures.py  Computes figures from the records of requests.
tables.py           Writes rows as text and as CSV, requests as rows, and numbers in their units.
"""
