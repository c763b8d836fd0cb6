"""Settings: their declarations, where they are read from, and the presets.

config.py    The configuration: one frozen tree of settings, layered by who consumes them.
presets.py   How other systems schedule, each as a dictionary of settings: to be compared with, on real
setting.py   What a setting is: its names, its type and what it takes.
sources.py   Reads settings from where they are given: a YAML file, variables, flags, nested plain values.
topology.py  How many workers of each kind a deployment has.
"""
