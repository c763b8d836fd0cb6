"""What a model writes, as the chat page shows it: Markdown, code, tables, thoughts; and never HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest

from tests.browser import Page
from tests.dashboard.chatting import ask, ended, texts
from tests.scripted_server import HOLD, Refusal, ScriptedServer, continued, piece, streamed, thought

WHOLE = """Here is **`f()`**: **bold**, *it*, ***both***, `a < b`, ~~gone~~, a snake_case_name, 2*3*4 and 5 \\* 6.
A second line: [a link](https://example.com/a_(b) "t"), https://example.com/x. <mailto:a@b.c> &lt;ok&gt;

## A heading ##

1. First
   ```python
   def f(x):
   \treturn x
   ```
2. Second
   - nested **bold**
     - deep
   - other

     more of other
3. Third
on a line of its own

> quoted *text*
> - in it

| Name | Value | Right |
|:-----|:-----:|------:|
| a | `x\\|y` | 1 |
| b<br>c | **d** |

    indented

    code
---
* bullet
~~~
unclosed
"""

SHOWN = (
    "<p>Here is <strong><code>f()</code></strong>: <strong>bold</strong>, <em>it</em>, <strong><em>both</em></strong>, "
    "<code>a &lt; b</code>, "
    "<del>gone</del>, a snake_case_name, 2*3*4 and 5 * 6.\nA second line: <a>a link</a>, <a>https://example.com/x</a>. "
    "<a>mailto:a@b.c</a> &lt;ok&gt;</p><h4>A heading</h4>"
    "<ol><li><p>First</p><div><div><span>python</span><button>Copy</button></div>"
    "<pre><code>def f(x):\n\treturn x</code></pre></div></li>"
    "<li><p>Second</p><ul><li><p>nested <strong>bold</strong></p><ul><li><p>deep</p></li></ul></li>"
    "<li><p>other</p><p>more of other</p></li></ul></li><li><p>Third\non a line of its own</p></li></ol>"
    "<blockquote><p>quoted <em>text</em></p><ul><li><p>in it</p></li></ul></blockquote>"
    "<div><table><thead><tr><th>Name</th><th>Value</th><th>Right</th></tr></thead>"
    "<tbody><tr><td>a</td><td><code>x|y</code></td><td>1</td></tr>"
    "<tr><td>b\nc</td><td><strong>d</strong></td><td></td></tr></tbody></table></div>"
    "<div><div><span></span><button>Copy</button></div><pre><code>indented\n\ncode</code></pre></div><hr><ul><li><p>bullet</p></li></ul>"
    "<div><div><span></span><button>Copy</button></div><pre><code>unclosed\n</code></pre></div>"
)

ATTRIBUTES = "class|href|target|rel|type|role|start|tabindex|aria-label"
WRITTEN = f"document.querySelector('.assistant').innerHTML.replace(/ ({ATTRIBUTES})=\"[^\"]*\"/g, '')"


def answered(page: Page, server: ScriptedServer, *pieces: str, waits: Sequence[str] = ()) -> None:
    server.replies = [[*waits, *streamed(*pieces)]]
    ask(page, "Go")
    ended(page, 2)


def test_markdown_is_shown(desk: Page, server: ScriptedServer) -> None:
    answered(desk, server, *(WHOLE[at : at + 7] for at in range(0, len(WHOLE), 7)))
    assert desk.value(WRITTEN) == SHOWN
    hrefs = desk.value("[...document.querySelectorAll('.assistant a')].map(a => [a.href, a.rel, a.target])")
    links = ["https://example.com/a_(b)", "https://example.com/x", "mailto:a@b.c"]
    assert hrefs == [[url, "noopener noreferrer", "_blank"] for url in links]
    sides = desk.value("[...document.querySelectorAll('.assistant th')].map(th => getComputedStyle(th).textAlign)")
    assert sides == ["left", "center", "right"]


def written(page: Page, pieces: Sequence[str]) -> None:
    """Write an answer, and look at the page after each piece, however quickly they come."""
    page.value(
        "byId('chat').innerHTML = '<div class=assistant></div>'; place = byId('chat').firstChild; "
        f"writing = new Writing(place, false, (change) => change()); for (const piece of {json.dumps(pieces)}) "
        "{ writing.add(piece); writing.show(true); }; writing.show()"
    )


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_markdown_is_the_same_in_whatever_pieces_it_comes(desk: Page, size: int) -> None:
    written(desk, [WHOLE[at : at + size] for at in range(0, len(WHOLE), size)])
    assert desk.value(WRITTEN) == SHOWN


def test_a_long_answer_costs_no_more_a_word_than_a_short_one(desk: Page) -> None:
    """Each piece has only the last block made again."""
    desk.value(
        "made = 0; create = document.createElement;"
        " document.createElement = (...of) => (made++, create.apply(document, of))"
    )
    written(desk, [f"Paragraph **{number}** with `code`.\n\n" for number in range(300)])
    assert len(texts(desk, ".assistant p")) == 300
    assert 900 <= desk.value("made") < 3_000


EVIL = [
    "<script>hit = 1</script>",
    "<img src=x onerror='hit = 1'>",
    "<svg onload=hit=1><a href='javascript:hit=1'>x</a>",
    "[x](javascript:hit=1)",
    "[x](JaVaScRiPt:hit=1)",
    "[x](java\tscript:hit=1)",
    "[x](data:text/html,<script>hit=1</script>)",
    "[x](vbscript:hit)",
    "![x](http://evil.example/p.png)",
    "![x](javascript:hit=1)",
    '[x](http://evil.example/"onmouseover="hit=1)',
    "<http://evil.example/' onclick='hit=1>",
    '```"><img src=x onerror=hit=1>\n</code></pre><script>hit=1</script>\n```',
    "| <img src=x onerror=hit=1> |\n|---|\n| <script>hit=1</script> |",
    "&lt;script&gt;hit=1&lt;/script&gt;",
    "`<iframe src=//evil.example>`",
    "# <style>body{display:none}</style>",
    "<form action=//evil.example><input name=q></form>",
]
ALLOWED = "a blockquote br button code del div em h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul"


def test_nothing_that_a_model_writes_becomes_html(desk: Page, server: ScriptedServer) -> None:
    """The fixture sees that nothing was loaded from elsewhere."""
    server.replies = [[thought("".join(EVIL)), *streamed("\n\n".join(EVIL))]]
    ask(desk, EVIL[1])
    ended(desk, 2)
    desk.value("byId('chat').scrollTop = 0")
    desk.click(".thinking summary")
    tags = set(desk.value("[...document.querySelectorAll('.assistant *')].map(one => one.localName)"))
    assert tags <= set(ALLOWED.split())
    assert desk.value("document.querySelectorAll('.user *, .thinking pre *').length") == 0
    for text in ("<script>hit = 1</script>", "[x](javascript:hit=1)", "<form action=//evil.example>", "<style>"):
        assert text in desk.text(".assistant")
    anchors = desk.value(
        "[...document.querySelectorAll('.assistant a')].map(a => a.getAttributeNames().join() + a.protocol)"
    )
    assert set(anchors) == {"href,target,relhttp:"}
    assert desk.value("typeof hit") == "undefined"
    desk.send("Page.reload")  # and none of it comes back as HTML
    desk.until("document.readyState === 'complete' && typeof current === 'object' && current.turns.length === 2")
    assert set(desk.value("[...document.querySelectorAll('.assistant *')].map(one => one.localName)")) == tags
    server.replies = [Refusal(400, json.dumps({"error": {"message": EVIL[1]}}))]
    ask(desk, "Hi")
    desk.until("document.querySelector('#chat .bad') !== null")
    assert texts(desk, "#chat .bad") == [EVIL[1]]
    assert desk.value("typeof hit") == "undefined"


def test_what_is_there_stays_as_it_is_while_more_comes(desk: Page, server: ScriptedServer) -> None:
    """So nothing flickers, and what is marked stays marked."""
    code = [f"line_{number} = {number}\n" for number in range(300)]
    begins, goes_on = ["First.\n\nWith **words** and\n\n```python\n", *code[:9]], [*code[9:], "```\nLast."]
    server.replies = [[*streamed(*begins), HOLD, *streamed(*goes_on)]]
    ask(desk, "Go")
    desk.until("document.querySelector('.assistant pre')?.textContent.includes('line_8')")
    desk.value(
        "marked = document.querySelector('.assistant code').firstChild; first = document.querySelector('.assistant p')"
    )
    desk.value("getSelection().setBaseAndExtent(marked, 0, marked, 10)")
    server.hold.set()
    ended(desk, 2)
    assert desk.value("getSelection().toString()") == "line_0 = 0"
    assert desk.value("marked === document.querySelector('.assistant code').firstChild && first.isConnected")
    assert texts(desk, ".assistant pre") == ["".join(code)[:-1]]
    assert texts(desk, ".assistant > p") == ["First.", "With words and", "Last."]


def test_half_of_a_mark_is_not_seen(desk: Page, server: ScriptedServer) -> None:
    server.replies = [[*streamed("It is **very bo"), HOLD, *streamed("ld** and `co"), HOLD, *streamed("de`")]]
    ask(desk, "Go")
    for shown in ("It is <strong>very bo</strong>", "It is <strong>very bold</strong> and <code>co</code>"):
        desk.until(f"{WRITTEN} === '<p>{shown}</p>'", 20)
        server.hold.set()
    ended(desk, 2)
    assert texts(desk, ".assistant") == ["It is very bold and code"]


@pytest.mark.parametrize("evil", ["**a ", "*a_b ", "__a ", "> ", "- ", "[a]("])
def test_no_text_holds_the_page_up(desk: Page, evil: str) -> None:
    """Emphasis takes 20 s where each of 40,000 marks is tried with each other."""
    desk.value("began = performance.now()")
    written(desk, [evil * 40_000 + "x"])
    assert desk.value("performance.now() - began") < 2_000
    assert desk.value("place.textContent.length") >= len(evil.strip("->[ "))


def test_thoughts_are_seen_as_they_come_and_folded_then(page: Page, server: ScriptedServer) -> None:
    server.replies = [
        [thought("I wonder "), HOLD, thought("what *to* say."), HOLD, *streamed("Hello!")],
        streamed("Yes"),
    ]
    ask(page, "Hi")
    for seen in ("I wonder ", "I wonder what *to* say."):
        page.until(f"document.querySelector('.thinking pre').textContent === {json.dumps(seen)}", 20)
        assert texts(page, ".thinking pre") == [seen]
        assert texts(page, ".thinking summary") == ["Thinking …"]
        server.hold.set()
    ended(page, 2)
    assert texts(page, ".assistant") == ["Hello!"]
    assert texts(page, ".thinking pre") == []
    assert texts(page, ".thinking summary")[0].startswith("Thought for ")
    page.click(".thinking summary")
    assert texts(page, ".thinking pre") == ["I wonder what *to* say."]
    ask(page, "Sure?")
    ended(page, 4)
    assert server.bodies[-1]["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Sure?"},
    ]
    assert texts(page, ".thinking summary") == texts(page, ".thinking summary")[:1], "the second answer has none"


def test_a_model_that_only_thought_has_its_thoughts_kept(desk: Page, server: ScriptedServer) -> None:
    server.replies = [[thought("Hmm ..."), '{"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}']]
    ask(desk, "Hi")
    ended(desk, 2)
    assert texts(desk, "#chat .assistant, #chat .bad") == []
    desk.click(".thinking summary")
    assert texts(desk, ".thinking pre") == ["Hmm ..."]


def test_nothing_is_said_of_what_a_server_does_not_count(page: Page, server: ScriptedServer) -> None:
    usages = ["", "{}", '{"prompt_tokens": 3}', '{"completion_tokens": 2, "total_tokens": 5}']
    for turn, usage in enumerate(usages):
        server.replies = [[piece("Hello!"), *([f'{{"choices": [], "usage": {usage}}}'] if usage else []), "[DONE]"]]
        ask(page, "Hi")
        ended(page, 2 * turn + 2)
        counted = ", 2 tokens, N tokens/s; 5 tokens of context" if "completion" in usage else ""
        said = re.sub(r"\d+(?= ms)|\d+(?= tokens/s)", "N", page.text("#times"))
        assert said == f"first token after N ms{counted}"


def test_a_model_without_template_goes_on_with_the_text(server: ScriptedServer, desk: Page) -> None:
    server.is_chat = False
    desk.send("Page.reload")
    desk.until("document.readyState === 'complete' && byId('curl').textContent.includes('/v1/completions')")
    assert "no chat template" in desk.text("body")
    end = '{"choices": [], "usage": {"completion_tokens": 2, "total_tokens": 9}}'
    server.replies = [[continued(" *Jupiter*,"), continued("\nSaturn", "length"), end, "[DONE]"], [continued(" x")]]
    ask(desk, "The largest planets are")
    ended(desk, 2)
    assert texts(desk, ".assistant") == [" *Jupiter*,\nSaturn"]
    assert "cut" in desk.text("#times")
    ask(desk, "Paris is")
    ended(desk, 4)
    assert server.paths == ["/v1/completions"] * 2
    assert [body["prompt"] for body in server.bodies] == ["The largest planets are", "Paris is"]
    assert all(body["max_tokens"] > 16 and "messages" not in body for body in server.bodies)
