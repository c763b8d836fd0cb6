"""Traces by OpenTelemetry.

traces.py  Follow requests, and send a span of each and of its stages to a collector, where one is configured.
"""
