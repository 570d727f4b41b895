"""A real browser opens the page at ``/``: files, header, race and live views, keys; what stays text."""

from typing import get_args

import pytest

from tests.server.browser import Browser
from tests.server.conftest import StartServer
from tests.server.page_user import FAINT, figures, legends, page, send, texts, tokens, wait_until_ready
from tests.server.running import MODEL, RunningServer
from truedraft.engine.messages import Source
from truedraft.server.routes.page import FOLDER

HOSTILE = (
    "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"
    "\x1b[31mred\x07\x9b2J\u202eevil</div><style>*{display:none}</style>&lt;"
    "[here](javascript:window.hacked=1) ![x](https://evil.invalid/pixel.png) "
    "<a href=javascript:alert(1)>a</a>"
)
MAX_BYTES = 230_000
CALLED_SO = ("prediction", "grammar")  # sources whose name in requests is their name in words


def options(browser: Browser) -> list[str]:
    """Returns the sources that the settings offer."""
    offered = "[...document.querySelector('#settings [name=method]').options].filter(o => !o.hidden)"
    return sorted(browser.run(f"{offered}.map(o => o.value)"))


def test_files_are_small_plain_and_refer_to_nothing_else(server: RunningServer) -> None:
    names = ["", *(f"page/{path.relative_to(FOLDER)}" for path in FOLDER.rglob("*") if path.is_file())]
    total = 0
    for name in names:
        response = server.get(f"/{name}")
        assert response.status_code == 200
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "unsafe" not in response.headers["content-security-policy"]
        is_later = "swagger" in name or "prism" in name  # only /docs, and only a block of code, load these
        total += 0 if is_later else len(response.content)
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        if "vendor" not in name:
            assert "http://" not in text
            assert "https://" not in text
            assert "innerHTML" not in text
    assert total < MAX_BYTES
    for name in ("page/", "page/nothing.js", "page/../app.py", "page/%2e%2e/app.py", "page//etc/passwd"):
        assert server.get(f"/{name}").status_code == 404, name
    assert server.client.head("/").status_code == 200


def test_the_header_says_what_is_served(browser: Browser, server: RunningServer) -> None:
    """It is in words for people: no folders' names, and the types of the weights, not of the arithmetic."""
    with page(browser, server):
        line = browser.text("#server-text")
        assert line.split(" · ")[:2] == [MODEL, "CPU"]
        browser.click("#server")
        facts = dict(zip(texts(browser, "#about-facts dt"), texts(browser, "#about-facts dd"), strict=True))
        assert facts["Name in requests"] == MODEL
        assert facts["Context"] == "512 tokens of prompt and answer"
        assert facts["Who drafts"] in line


SOURCES = sorted({*get_args(Source)} - {"none"})


def test_every_source_has_a_name_a_colour_and_an_option(browser: Browser, start_server: StartServer) -> None:
    with start_server("--sources", ",".join(SOURCES)) as server, page(browser, server):
        browser.fill("[name=max_tokens]", str(4 * len(SOURCES)))
        send(browser)
        kinds = [kind for kind in legends(browser)[0] if kind.startswith("accepted, ")]
        assert len(kinds) == len(SOURCES)
        assert not [kind for kind in kinds if kind.removeprefix("accepted, ") in {*SOURCES} - {*CALLED_SO}]
        swatches = "[...document.querySelectorAll('.turn .summary .swatch')]"
        colours = browser.run(f"{swatches}.map(e => getComputedStyle(e).backgroundColor)")
        assert len({*colours, "rgba(0, 0, 0, 0)"}) == len(kinds) + 2, colours  # bonus has one as well
        assert options(browser) == sorted(["", "none", *SOURCES])
        for mode in ("light", "dark"):
            browser.look(theme=mode)
            assert browser.run(FAINT.replace("SELECTOR", "'.token'")) == []


def test_only_what_drafts_here_is_named_and_offered(browser: Browser, start_server: StartServer) -> None:
    """A head is no draft model. Where nothing but the text drafts, the race is an edit of a text."""
    drafts = "drafts by an EAGLE head or n-grams of the text"
    with start_server("--sources", "eagle,grammar,ngram") as server, page(browser, server):
        assert browser.text("#server-text").endswith(f" \u00b7 {drafts}")
        assert options(browser) == ["", "eagle", "grammar", "ngram", "none"]
        assert "story" in browser.run("document.querySelector('#race [name=prompt]').value")
    with start_server("--sources", "grammar,ngram") as server, page(browser, server):
        assert browser.text("#server-text").endswith(" \u00b7 drafts by n-grams of the text")
        assert "Tom in place of Tim" in browser.run("document.querySelector('#race [name=prompt]').value")
    with start_server("--sources", "grammar") as server, page(browser, server):
        assert browser.text("#server-text").endswith(" \u00b7 no drafts")


@pytest.mark.parametrize("order", ["alone", "together"])
def test_race(browser: Browser, server: RunningServer, order: str) -> None:
    """Chats race, since the model has a template; each lane runs as often as there are pairs."""
    with page(browser, server, "race"):
        assert browser.run("document.querySelector('#race [name=kind]').value") == "chat"
        num_before = len(server.messages_to_worker("Generate"))
        for name, value in (("order", order), ("max_tokens", "40"), ("pairs", "3")):
            browser.fill(f"#race [name={name}]", value)
        browser.click("#start-race")
        browser.wait("document.querySelector('#verdict').classList.contains('done')")
        verdict = browser.text("#verdict")
        assert "times as fast, by the medians of 3 runs each; pairs range from" in verdict
        assert "Same text in all runs, 40 tokens" in verdict
        assert len(server.messages_to_worker("Generate")) == num_before + 6
        assert browser.run("document.querySelectorAll('#pairs .dot-pair').length") == 3
        for lane, kind in (("plain", "plain"), ("speculative", "draft_model")):
            assert browser.run(f"document.querySelectorAll('#lane-{lane} .token').length") == 40
            assert browser.run(f"document.querySelectorAll('#lane-{lane} .token.{kind}').length") > 0
        shown = [float(text.removesuffix(" s")) for text in texts(browser, ".watch")]
        factor = float(verdict.partition(" was ")[2].split()[0])
        # The verdict is about the medians that the watches show, in hundredths of a second.
        least, most = min(shown), max(shown)
        assert (most - 0.005) / (least + 0.005) - 0.01 <= factor
        assert factor <= (most + 0.005) / max(least - 0.005, 1e-9) + 0.01


def test_live(browser: Browser, server: RunningServer) -> None:
    with page(browser, server, "live"):
        browser.wait("document.querySelectorAll('#charts canvas').length === 8")
        browser.wait("document.querySelector('#charts .is-idle .idle').textContent.includes('test request')")
        tokens = server.metric("truedraft_generation_tokens_total")
        browser.click("#test-request")
        browser.wait("!document.querySelector('#charts .chart').classList.contains('is-idle')")
        browser.wait("!document.querySelector('#test-request').disabled")
        shown = f"{tokens + 300:,.0f}"
        browser.wait(f"[...document.querySelectorAll('#now dd')].some(e => e.textContent === '{shown}')")
        assert browser.text("#why").startswith("Speculation is ")
        # The first token of a draft is number 1 for people; in /metrics it is 0.
        assert texts(browser, "#charts .column span") == ["1", "2", "3"]
        assert browser.run("document.querySelector('#charts .bar').title").startswith("token 1 of a draft: ")


def test_keys_and_themes(browser: Browser, server: RunningServer) -> None:
    """Tabs by arrow keys; the chosen colours outlive the page; nothing is wider than a small window."""
    with page(browser, server):
        browser.run("document.querySelector('#tab-chat').focus()")
        browser.press("ArrowRight")
        assert (
            browser.run("!document.querySelector('#race').hidden && document.activeElement.id") == "tab-race"
        )
        browser.click("#tab-chat")
        colour = "getComputedStyle(document.body).backgroundColor"
        light = browser.run(colour)
        browser.look(theme="dark")
        dark = browser.run(colour)
        assert light != dark
        browser.click("#theme")
        assert (browser.text("#theme"), browser.run(colour)) == ("Theme: light", light)
        browser.open(f"{server.url}/")
        assert browser.text("#theme") == "Theme: light"
        wait_until_ready(browser)
        browser.fill("[name=max_tokens]", "40")
        send(browser, "wide" * 100)
        for width in (320, 390, 760):
            browser.look(width=width)
            for view in ("chat", "race", "live"):
                browser.click(f"#tab-{view}")
                overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert browser.run(overflow) == 0, (width, view)


def test_it_can_be_read_and_named(browser: Browser, server: RunningServer) -> None:
    """What WCAG's AA asks of contrasts, of names that hold what is seen, and of landmarks."""
    with page(browser, server):
        assert browser.run("document.activeElement.id") == "prompt"  # ready to type
        browser.fill("[name=max_tokens]", "8")
        browser.click("#settings-button")
        send(browser, "Read `this`.")
        for theme in ("light", "dark"):
            for view in ("text", "tokens"):
                browser.look(theme=theme)
                browser.click(f"[name=view][value={view}]")
                assert browser.run(FAINT.replace("SELECTOR", "'body *'")) == [], (theme, view)
        named = "[...document.querySelectorAll('button[aria-label]')].filter(b => b.textContent.trim())"
        assert browser.run(f"{named}.map(b => b.outerHTML)") == []
        plain = "[...document.querySelectorAll('div[aria-label], span[aria-label]')].filter(e => !e.role)"
        assert browser.run(f"{plain}.map(e => e.outerHTML)") == []
        places = "'header, nav, main, dialog, .skip, [hidden]'"
        lost = f"[...document.body.children].filter(e => !e.matches({places}))"
        assert browser.run(f"{lost}.map(e => e.outerHTML)") == []


def test_a_key_is_asked_for_and_kept_in_memory(browser: Browser, start_server: StartServer) -> None:
    with start_server(api_keys=["one-key"]) as server:
        browser.look()
        browser.open(f"{server.url}/")
        browser.wait("document.querySelector('#key-dialog').open")
        browser.fill("#key", "wrong")
        browser.click("#key-form .primary")
        browser.wait(
            "document.querySelector('#key-dialog').open && !document.querySelector('#key-error').hidden"
        )
        browser.fill("#key", "one-key")
        browser.click("#key-form .primary")
        wait_until_ready(browser)
        browser.fill("[name=max_tokens]", "4")
        send(browser)
        assert "".join(tokens(browser)) == "Hell"
        browser.click("#code")
        browser.wait("document.querySelector('#code-dialog').open")
        for language in ("curl", "python"):
            browser.click(f"[name=language][value={language}]")
            assert "one-key" not in browser.text("#code-text")
        assert "OPENAI_API_KEY" in browser.text("#key-hint")
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert "one-key" not in browser.run(kept)
        assert browser.run("document.querySelector('#key').value") == ""
        browser.open(f"{server.url}/")
        browser.wait("document.querySelector('#key-dialog').open")


def test_what_a_model_says_is_text(browser: Browser, start_server: StartServer) -> None:
    foreign = (
        "document.querySelectorAll('main script, main img, main style, main a[href^=javascript]').length"
    )
    with start_server("--text", HOSTILE, "--once") as server, page(browser, server):
        browser.fill("[name=max_tokens]", "400")
        send(browser, HOSTILE)
        assert figures(browser)[0]["ended"] == "by itself"
        assert browser.run(foreign) == 0
        for shown in (texts(browser, ".prose")[0], texts(browser, ".bubble")[0]):
            assert (
                "<img src=x onerror='window.hacked=1'>\u241b[31mred\u2407[U+009B]2J[U+202E]evil</div>"
                in shown
            )
        links = browser.run("[...document.querySelectorAll('.prose a')].map(a => [a.href, a.rel])")
        assert links == [["https://evil.invalid/pixel.png", "noopener noreferrer"]]
        shown = "".join(tokens(browser)).replace("\u25aa", "")
        assert shown == HOSTILE.replace("\x1b", "\u241b").replace("\x07", "\u2407").replace(
            "\x9b", "[U+009B]"
        ).replace("\u202e", "[U+202E]")
        refused = "try { document.body.innerHTML = '<i>x</i>'; 'taken' } catch (error) { error.name }"
        assert browser.run(refused) == "TypeError"
        browser.click("#tab-race")
        browser.fill("#race [name=pairs]", "1")
        browser.click("#start-race")
        browser.wait("document.querySelector('#verdict').classList.contains('done')")
        assert browser.run(foreign) == 0
        assert browser.run("window.hacked") is None
        assert [problem for problem in browser.problems if "TrustedHTML" not in problem] == []
        browser.problems.clear()
