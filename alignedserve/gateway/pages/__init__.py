"""Small pages for browsers, beside the live page.

front.py  The answer of /: what runs here, and where to go on.
docs.py   The page /docs: the OpenAPI document in HTML.
html.py   A page in HTML that loads nothing else, and the headers that hold it to that.
"""
