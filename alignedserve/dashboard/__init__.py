"""The live page: pictures of the deployment at a moment, and the page that shows them.

A gateway makes a picture each second of what its owner hears, and `simulate --page` makes the same of a simulated run.

picture.py     A picture of the deployment: what the page is given, and what a gateway hears for it.
sharing.py     The requests of all owners, whichever gateway shows the page.
page.py        The page as HTML, live or with a recorded run in it.
page.html      The page: its style, and the script that draws pictures.
front.html     The page at /: a chat, a command, links.
chat.js        Its chat: asks, waits in line, keeps chats in the browser.
markdown.js    What a model writes, as nodes of a page.
docs.html      The script that tries calls in /docs.
"""
