"""Find the tool calls in a model's output, in the format of each family of models.

    formats      the table: names, signs in templates, markers, and the layout of one call
    layouts      json_calls, named_calls, tagged_calls, python_calls: each reads, writes, and says as a grammar one call
    CallReader   gives text to a layout through a tape, and says what was found

coercion.py      Turns values that a model wrote as text or as Python into the JSON that a function's schema asks for.
describing.py    Shows tools and calls to a model as its chat template can take them.
formats.py       The table of formats: how a template gives each away, and how it is read and written.
grammar.py       The language in which a format says how one of its calls is written, for a grammar.
json_calls.py    Calls that are JSON objects with a name and arguments, alone or in a list.
literals.py      Reads values that are written in JSON or in Python.
markers.py       Finds markers in a text that is still arriving.
named_calls.py   Calls that are a name with its arguments in JSON after it, between markers.
parts.py         The parts of an output that has tool calls in it.
python_calls.py  Calls in Python: a list of functions with named arguments.
reading.py       Finds the tool calls of one output while its text arrives.
scanning.py      Finds where a value ends, in JSON or in Python, while its text arrives.
tagged_calls.py  Calls whose arguments stand between tags, each as plain text.
tape.py          The text of one output while it arrives, and what has been found in it.
"""
