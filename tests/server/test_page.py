"""A real browser clicks through the page at ``/``, where what a model says stays text."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.server.browser import Browser, open_browser
from tests.server.conftest import StartServer
from tests.server.running import MODEL, RunningServer, run_server
from tests.server.test_tools import TEMPLATE, THOUGHT
from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.server.routes.page import FOLDER
from truedraft.server.text.tokenizer import load_tokenizer

HOSTILE = (
    "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"
    "\x1b[31mred\x07\x9b2J\u202eevil</div><style>*{display:none}</style>&lt;"
)
MAX_BYTES = 150_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@contextmanager
def page(browser: Browser, server: RunningServer, view: str = "playground") -> Iterator[None]:
    """Opens the page; at the end nothing may have been refused or thrown."""
    browser.problems.clear()
    browser.look()
    browser.open(f"{server.url}/#/{view}")
    browser.wait("document.getElementById('model').length > 0")
    yield
    assert browser.problems == []


def generate(browser: Browser) -> list[str]:
    """The texts of all tokens once the answer is there."""
    browser.click("#generate")
    browser.wait("document.querySelector('#figures').textContent.includes('end')")
    browser.wait("!document.querySelector('#generate').disabled")
    return list(
        browser.run("[...document.querySelectorAll('.text:last-of-type .token')].map(t => t.textContent)")
    )


def legend(browser: Browser) -> dict[str, int]:
    lines = browser.run("[...document.querySelectorAll('#legend li')].map(line => line.textContent)")
    return {name: int(count) for name, _, count in (line.rpartition(" ") for line in lines) if int(count)}


def figures(browser: Browser) -> dict[str, str]:
    texts = "[...document.querySelectorAll('#figures div > *')].map(part => part.textContent)"
    names_and_values = iter(browser.run(texts))
    return dict(zip(names_and_values, names_and_values, strict=True))


def test_files_are_small_plain_and_refer_to_nothing_else(server: RunningServer) -> None:
    names = ["", *(f"page/{path.relative_to(FOLDER)}" for path in FOLDER.rglob("*") if path.is_file())]
    total = 0
    for name in names:
        response = server.get(f"/{name}")
        assert response.status_code == 200
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "unsafe" not in response.headers["content-security-policy"]
        total += len(response.content) if "swagger" not in name else 0  # only /docs loads that
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        if "vendor" not in name:
            assert "http://" not in text
            assert "https://" not in text
            assert "innerHTML" not in text
    assert total < MAX_BYTES
    for name in ("page/", "page/nothing.js", "page/../app.py", "page/%2e%2e/app.py", "page//etc/passwd"):
        assert server.get(f"/{name}").status_code == 404, name
    assert server.client.head("/").status_code == 200


@pytest.mark.parametrize("mode", ["chat", "completion"])
@pytest.mark.parametrize("stream", [True, False])
def test_playground(browser: Browser, server: RunningServer, mode: str, stream: bool) -> None:
    """The fake worker gives three accepted tokens and a bonus each step."""
    generated = server.metric("truedraft_generation_tokens_total")
    with page(browser, server):
        browser.click(f"[name=mode][value={mode}]")
        browser.fill("[name=max_tokens]", "20")
        browser.run(f"document.querySelector('[name=stream]').checked = {str(stream).lower()}")
        tokens = generate(browser)
        assert "".join(tokens).replace("\u25aa", "") == "Hello, wörld 😀! "
        assert server.metric("truedraft_generation_tokens_total") == generated + 20
        assert legend(browser) == {"accepted, draft model": 15, "bonus": 5}
        assert figures(browser)["tokens"] == "20"
        assert figures(browser)["accepted"] == "15 of 15 (100 %)"
        browser.run("document.querySelector('.text').focus()")
        for _ in range(4):
            browser.press("ArrowRight")
        card = browser.text("#token-card")
        assert '"l"' in card
        assert "bonus" in card
        assert "0.750" in card
        browser.press("ArrowLeft")
        assert "accepted, draft model" in browser.text("#token-card")
        browser.click("#clear")
        assert legend(browser) == {}


def test_a_chat_goes_on(browser: Browser, server: RunningServer) -> None:
    with page(browser, server):
        browser.fill("[name=max_tokens]", "4")
        generate(browser)
        browser.fill("#prompt", "And then?")
        generate(browser)
        assert (
            browser.run("[...document.querySelectorAll('.turn')].map(turn => turn.className)")
            == [
                "turn user",
                "turn assistant",
            ]
            * 2
        )


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose model thinks before it says something."""
    folder = write_tokenizer(tmp_path_factory.mktemp("models") / MODEL, chat_template=TEMPLATE)
    log, said = tmp_path_factory.mktemp("log"), f"{THOUGHT}Wörld 😀."
    with run_server(folder, load_tokenizer(str(folder)), log, "--text", said, "--once") as running:
        yield running


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_folds_away(browser: Browser, thinking: RunningServer, stream: bool) -> None:
    with page(browser, thinking):
        browser.run(f"document.querySelector('[name=stream]').checked = {str(stream).lower()}")
        tokens = "[...document.querySelectorAll('{} .token')].map(t => t.textContent).join('')"
        for turn in (1, 2):
            generate(browser)
            said = browser.run(tokens.format(f".turn:nth-of-type({turn}) .text"))
            assert said.replace("\u25aa", "") == "Wörld 😀."
            thoughts = browser.run(tokens.format(f".turn:nth-of-type({turn}) .thoughts"))
            assert thoughts == THOUGHT
            assert (
                browser.run("[...document.querySelectorAll('details.reasoning')].map(d => d.open)")
                == [False] * turn
            )
        assert sum(legend(browser).values()) == int(figures(browser)["tokens"]) * 2
    prompt = thinking.messages_to_worker("Generate")[-1].partition("prompt_token_ids=")[2].partition("]")[0]
    text = thinking.post("/detokenize", {"tokens": json.loads(f"{prompt}]")}).json()["prompt"]
    assert "<think>Hm, 2.</think>Wörld 😀.;" in text


def test_stop(browser: Browser, start_server: StartServer) -> None:
    with start_server() as server, page(browser, server):
        server.worker.at_most(2)
        browser.fill("[name=max_tokens]", "400")
        browser.click("#generate")
        browser.wait("document.querySelectorAll('.token').length === 8")
        browser.press("Escape")
        browser.wait("!document.querySelector('#generate').disabled")
        assert figures(browser)["end"] == "stopped here"
        server.worker.go_on()
        server.wait_for_requests(0)


def test_an_error_is_shown(browser: Browser, server: RunningServer) -> None:
    with page(browser, server):
        browser.fill("[name=stop]", "\n".join(f"stop {number}" for number in range(65)))
        browser.click("#generate")
        browser.wait("!document.querySelector('#error').hidden")
        assert "max_stop_strings" in browser.text("#error")
        browser.problems.clear()  # the browser notes the status 400


@pytest.mark.parametrize("order", ["alone", "together"])
def test_race(browser: Browser, server: RunningServer, order: str) -> None:
    with page(browser, server, "race"):
        browser.fill("#race [name=order]", order)
        browser.fill("#race [name=max_tokens]", "40")
        browser.click("#start-race")
        browser.wait("document.querySelector('#verdict').classList.contains('done')")
        assert "Same text, all 40 tokens" in browser.text("#verdict")
        for lane, kind in (("plain", "plain"), ("speculative", "draft_model")):
            assert browser.run(f"document.querySelectorAll('#lane-{lane} .token').length") == 40
            assert browser.run(f"document.querySelectorAll('#lane-{lane} .token.{kind}').length") > 0
        assert browser.run("document.querySelectorAll('.winner').length") == 1


def test_live(browser: Browser, server: RunningServer) -> None:
    with page(browser, server, "live"):
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 8})
        tokens = f"{server.metric('truedraft_generation_tokens_total'):,.0f}"
        browser.wait(
            f"document.querySelector('#now').textContent.includes('{tokens}tokens') || "
            f"document.querySelector('#now').textContent.includes('tokens generated{tokens}')"
        )
        assert browser.run("document.querySelectorAll('#charts canvas').length") == 8
        assert browser.run("document.querySelectorAll('#charts .bar').length") == 3
        assert browser.text("#why").startswith("Speculation ")


def test_keys_and_themes(browser: Browser, server: RunningServer) -> None:
    """Tabs by arrow keys; the chosen colours outlive the page."""
    with page(browser, server):
        browser.run("document.querySelector('#tab-playground').focus()")
        browser.press("ArrowRight")
        assert (
            browser.run("!document.querySelector('#race').hidden && document.activeElement.id") == "tab-race"
        )
        colour = "getComputedStyle(document.body).backgroundColor"
        light = browser.run(colour)
        browser.look(theme="dark")
        dark = browser.run(colour)
        assert light != dark
        browser.click("#theme")
        assert (browser.text("#theme"), browser.run(colour)) == ("Theme: light", light)
        browser.open(f"{server.url}/")
        assert browser.text("#theme") == "Theme: light"
        browser.run("localStorage.clear()")
        for width in (320, 390, 760):
            browser.look(width=width)
            for view in ("playground", "race", "live"):
                browser.click(f"#tab-{view}")
                overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert browser.run(overflow) == 0, (width, view)


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
        browser.wait("document.getElementById('model').length > 0")
        browser.fill("[name=max_tokens]", "4")
        assert "".join(generate(browser)) == "Hell"
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert "one-key" not in browser.run(kept)
        assert browser.run("document.querySelector('#key').value") == ""
        browser.open(f"{server.url}/")
        browser.wait("document.querySelector('#key-dialog').open")


def test_what_a_model_says_is_text(browser: Browser, start_server: StartServer) -> None:
    with start_server("--text", HOSTILE, "--once") as server, page(browser, server):
        browser.fill("[name=max_tokens]", "400")
        shown = "".join(generate(browser)).replace("\u25aa", "")
        assert shown == HOSTILE.replace("\x1b", "\u241b").replace("\x07", "\u2407").replace(
            "\x9b", "[U+009B]"
        ).replace("\u202e", "[U+202E]")
        assert browser.run("window.hacked") is None
        assert browser.run("document.querySelectorAll('main script, main img, main style').length") == 0
        refused = "try { document.body.innerHTML = '<i>x</i>'; 'taken' } catch (error) { error.name }"
        assert browser.run(refused) == "TypeError"
        browser.click("#tab-race")
        browser.click("#start-race")
        browser.wait("document.querySelector('#verdict').classList.contains('done')")
        assert browser.run("document.querySelectorAll('main script, main img, main style').length") == 0
        assert browser.run("window.hacked") is None
        assert [problem for problem in browser.problems if "TrustedHTML" not in problem] == []
        browser.problems.clear()
