"""The live page: pictures of the deployment at a moment, and the page that shows them.

A gateway makes a picture each second of what its owner hears, and `simulate --page` makes the same of a simulated run.

picture.py     A picture of the deployment: what the page is given, and what a gateway hears for it.
sharing.py     The requests of all owners, whichever gateway shows the page.
page.py        The page as HTML, live or with a recorded run in it.
page.html      The page: its style, and the script that draws pictures.
front.html     The chat of the page at /.
docs.html      The script that tries calls in /docs.
"""
