"""Settings: their declarations, where they are read from, and the presets.

config.py    declares every setting, checks them together, and loads a configuration from its sources
lora.py      The adapters (LoRA) that a deployment begins with, as a setting says them.
presets.py   schedules by name: ours and those of other systems, as settings
setting.py   what a setting is: its names, its type, its range, and how it is reached
sources.py   reads settings from YAML, variables, flags and nested plain values; says what is wrong in one line
topology.py  how many workers of each kind a deployment has
"""
