"""Find the tool calls in a model's output, in the format of each family of models.

    formats      the table: names, signs in templates, markers, and the layout of one call
    layouts      each reads, writes, and says as a grammar one call
    scanning     the reader of an output, from which a layout takes text while it arrives; reasoning is parted so too

formats.py     The table of formats: how a template gives each away, and how it is read and written.
layouts.py     The ways in which one call is written.
scanning.py    The scanner of the text of one output while it arrives, and the reader of the calls in it.
values.py      Values in JSON, in Python or as plain text, and the JSON that a function's schema makes of them.
"""
