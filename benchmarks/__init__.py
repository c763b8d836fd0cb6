"""Measurements that back our claims; each prints one JSON line for a figure."""
