"""Small pages in HTML that load nothing else."""

from __future__ import annotations

from html import escape

from starlette.responses import HTMLResponse, Response

from alignedserve.dashboard.page import policy

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 960px; padding: 16px; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 8px 0; }
h2 { font-size: 18px; margin: 24px 0 8px; }
code { font: 14px/1.45 ui-monospace, monospace; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid #8884; vertical-align: top; }
details { border: 1px solid #8886; border-radius: 6px; margin: 8px 0; padding: 6px 12px; }
summary { cursor: pointer; }
.soft { opacity: .75; }
"""


def html_page(title: str, body: str) -> str:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>'


def html_answer(page: str) -> Response:
    headers = {
        "Content-Security-Policy": policy(page),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(page, headers=headers)
