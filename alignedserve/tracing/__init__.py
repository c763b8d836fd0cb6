"""Traces by OpenTelemetry: a span for each request that this process owns, and one for each of its stages.

request_trace.py  Follow a request, and say its spans when it has ended.
traces.py         Send spans to a collector by OTLP, where one is configured.
"""
