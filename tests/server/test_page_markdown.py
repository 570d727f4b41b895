"""Markdown on the page, in a real browser: text becomes elements, never HTML, and nothing is lost."""

import json
from typing import Any

import pytest

from tests.server.browser import Browser
from tests.server.page_user import page
from tests.server.running import RunningServer

RENDERED = [
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("# A *b*\n### C #", "<h3>A <em>b</em></h3><h5>C</h5>"),
    (
        "**a** *b* _c_ ~~d~~ ***e***",
        "<p><strong>a</strong> <em>b</em> <em>c</em> <del>d</del> <em><strong>e</strong></em></p>",
    ),
    ("*a **b** c*", "<p><em>a <strong>b</strong> c</em></p>"),
    ("2 * 3 * 4, snake_case_name, **open", "<p>2 * 3 * 4, snake_case_name, **open</p>"),
    ("`a*b*` ``c`d`` `open", "<p><code>a*b*</code> <code>c`d</code> `open</p>"),
    (r"\*a\* \q 5\|", r"<p>*a* \q 5|</p>"),
    ("<b>&amp;", "<p>&lt;b&gt;&amp;amp;</p>"),
    (
        "- a\n- b\n  - c\n- d",
        "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul>",
    ),
    (
        "3. a\n4. b\n\n   more\n\nend",
        '<ol start="3"><li><p>a</p></li><li><p>b</p><p>more</p></li></ol><p>end</p>',
    ),
    (
        "1. a\n   - b\n2. c\n- d",
        '<ol start="1"><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ol>'
        "<ul><li><p>d</p></li></ul>",
    ),
    ("- [x] a\n- [ ] b", "<ul><li><p>☑ a</p></li><li><p>☐ b</p></li></ul>"),
    ("text\n- a\nlazy", "<p>text</p><ul><li><p>a<br>lazy</p></li></ul>"),
    ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
    ("a\n\n---\n* * *", "<p>a</p><hr><hr>"),
    (
        "|a|b|\n|-|:-:|\n|`x\\|y`|2|\n|3|",
        '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody>'
        "<tr><td><code>x|y</code></td><td>2</td></tr><tr><td>3</td><td></td></tr></tbody></table></div>",
    ),
    ("a | b\nc", "<p>a | b<br>c</p>"),
    ("[a](javascript:x) [b](data:x) [c](/d)", "<p>[a](javascript:x) [b](data:x) [c](/d)</p>"),
]
LINKS = {
    '[a *b*](https://x.invalid/y_(z) "t")': ("https://x.invalid/y_(z)", "a b"),
    "see https://x.invalid/a_b_c.": ("https://x.invalid/a_b_c", "https://x.invalid/a_b_c"),
    "![alt](https://x.invalid/i.png)": ("https://x.invalid/i.png", "alt"),
    "[m](mailto:a@x.invalid)": ("mailto:a@x.invalid", "m"),
}
LENGTH = 400_000  # characters; more elements than a function takes arguments
# Each would take minutes if a search were repeated for every character.
LONG = [
    "*a ",
    "**a",
    "_a_b",
    "[",
    "[a](",
    "[a](()",
    "`a``b```",
    "> ",
    "- ",
    "|",
    "~~a",
    "![",
    "https://" + "." * 99,
    "*_",
    "\n\n",
    "# ",
]

SHOW = """import('/page/markdown.js').then(({MarkdownView}) => {
    const box = document.createElement('div');
    new MarkdownView(box).show(%s);
    box.querySelectorAll('[style]').forEach(cell => cell.removeAttribute('style'));
    return %s;
})"""


def shown(browser: Browser, text: str, result: str = "box.innerHTML") -> Any:
    return browser.run(SHOW % (json.dumps(text), result))


def test_text_becomes_elements(browser: Browser, server: RunningServer) -> None:
    with page(browser, server):
        for text, expected in RENDERED:
            assert shown(browser, text) == expected
        for text, (address, label) in LINKS.items():
            links = (
                "[...box.querySelectorAll('a')].map(a => [a.href, a.title, a.textContent, a.rel, a.target])"
            )
            assert shown(browser, text, links) == [[address, address, label, "noopener noreferrer", "_blank"]]


@pytest.mark.parametrize("end", ["\n```\nafter", ""])
def test_code_is_kept_as_it_is(browser: Browser, server: RunningServer, end: str) -> None:
    """While it comes, its end is still open."""
    code = "a = '*b*'\n\n  # <i>\n- c"
    with page(browser, server):
        parts = "[box.querySelector('.code span').textContent, box.querySelector('pre').textContent]"
        assert shown(browser, f"```python title\n{code}{end}", parts) == ["python", code]
        assert (
            shown(
                browser,
                f"- x\n\n  ```\n  {code.replace(chr(10), chr(10) + '  ')}\n  ```\n- y",
                "box.querySelector('pre').textContent",
            )
            == code
        )
        assert shown(browser, f"~~~~\n```\n~~~\n{end}", "box.querySelector('pre').textContent").startswith(
            "```\n~~~"
        )


def test_what_grows_is_built_once(browser: Browser, server: RunningServer) -> None:
    """Blocks that are complete keep their elements, so what is selected in them stays so."""
    script = """import('/page/markdown.js').then(({MarkdownView}) => {
        const [whole, grown] = [0, 0].map(() => document.createElement('div'));
        const text = %s, view = new MarkdownView(grown);
        let first = null, isSame = true;
        for (let end = 1; end <= text.length; end += 1) {
            view.show(text.slice(0, end));
            if (end > 12) { first ??= grown.firstChild; isSame &&= first === grown.firstChild; }
        }
        new MarkdownView(whole).show(text);
        return isSame && whole.innerHTML === grown.innerHTML;
    })"""
    text = "# Heading\n\n- a\n- b\n\n```js\nx\n```\n\n| a | b |\n|---|---|\n| 1 | **2** |\n\nend *here*"
    with page(browser, server):
        assert browser.run(script % json.dumps(text)) is True


def test_hostile_text_is_shown_and_kept(browser: Browser, server: RunningServer) -> None:
    with page(browser, server):
        for piece in LONG:
            text = f"{piece * (LENGTH // len(piece))}\nend"
            kept = shown(browser, text, "box.textContent.replace(/[^a-z.]/g, '').length")
            assert kept == len([letter for letter in text if letter in "abcdefghijklmnopqrstuvwxyz."]), piece
