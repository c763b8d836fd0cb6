"""What load tests and the simulator share: which requests come, what is recorded of them, and figures of that.

defaults.py  the workload and the device of users who name none
"""
