"""Settings: their declarations, where they are read from, and the presets.

choices.py             The values that settings take: choices, names of formats and families, adapters (LoRA).
config.py              The tree of all settings, how it is loaded from its sources, and checks of settings together
presets.py             schedules by name: ours and those of other systems, as settings
prices.py              The deployment's prices, and what requests are charged with.
sections.py            declares the settings, a class for each section
setting.py             what a setting is: its names, its type, its range, and how it is reached
sources.py             reads settings from YAML, variables, flags and nested plain values; says what is wrong
topology.py            how many workers of each kind a deployment has
"""
