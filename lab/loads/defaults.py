"""The workload and the device of users who name none."""

PROFILE = "rtxpro6000-llama-3.1-8b-tp1"
WORKLOAD = "chat"
