"""Deployments on Ray clusters of several nodes, all on this machine."""
