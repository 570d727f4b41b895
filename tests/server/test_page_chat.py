"""A real browser chats on the page: the tests see what is sent, what is shown and what is kept."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.server.browser import Browser
from tests.server.conftest import StartServer
from tests.server.page_user import (
    figures,
    last_prompt,
    legends,
    page,
    press_button,
    send,
    texts,
    tokens,
    turns,
    wait_for_answer,
    wait_until_ready,
)
from tests.server.running import MODEL, RunningServer, run_server
from tests.server.test_tools import SAID, TEMPLATE, THOUGHT
from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.server.text.tokenizer import load_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TEXT = "Hello, wörld 😀! "  # what the fake worker says, in 20 tokens


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose model thinks and speaks, and calls twice where it is offered a function."""
    folder = write_tokenizer(tmp_path_factory.mktemp("models") / MODEL, chat_template=TEMPLATE)
    replies = tmp_path_factory.mktemp("replies") / "replies.json"
    replies.write_text(json.dumps([["=", "Both are 3."], ["[add]", SAID], ["user:json", '{"a": [1, 2]}']]))
    options = ("--text", f"{THOUGHT}Wörld 😀.", "--replies", str(replies), "--once")
    with run_server(folder, load_tokenizer(str(folder)), tmp_path_factory.mktemp("log"), *options) as running:
        yield running


def test_enter_sends_and_shift_enter_begins_a_line(browser: Browser, server: RunningServer) -> None:
    with page(browser, server):
        browser.fill("[name=max_tokens]", "20")
        browser.run("document.querySelector('#prompt').focus()")
        browser.press("Enter")
        assert texts(browser, ".turn") == []  # there is nothing to send
        browser.type("one")
        browser.press("Enter", shift=True)
        browser.type("two")
        browser.press("Enter")
        wait_for_answer(browser)
        assert browser.run("document.querySelector('#prompt').value") == ""
        assert turns(browser) == ["one\ntwo", TEXT.rstrip()]
        assert "one\ntwo<|im_end|>" in last_prompt(server)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_figures_agree(browser: Browser, server: RunningServer, mode: str, stream: bool) -> None:
    """Bar, legend and figures are of one answer, and the line below has the sums of them."""
    generated = server.metric("truedraft_generation_tokens_total")
    with page(browser, server):
        browser.click(f"[name=mode][value={mode}]")
        browser.fill("[name=stream]", stream)
        browser.fill("[name=max_tokens]", "20")
        send(browser)
        browser.fill("[name=max_tokens]", "8")
        send(browser, "And then?")
        lengths = [20, 8] if mode == "chat" else [8]  # a completion is a text of its own
        assert [sum(legend.values()) for legend in legends(browser)] == lengths
        assert legends(browser)[-1] == {"accepted, draft model": 6, "bonus": 2}
        shown = figures(browser)
        assert [answer["tokens"] for answer in shown] == [str(length) for length in lengths]
        assert shown[-1]["drafts accepted"] == "6 of 6 (100%)"
        assert shown[-1]["ended"] == "at max tokens"
        accepted = sum(length * 3 // 4 for length in lengths)
        assert f"{sum(lengths)} tokens, {accepted} of {accepted} drafts accepted" in browser.text("#totals")
        assert "".join(tokens(browser)).replace("\u25aa", "") == TEXT[:8]
    assert server.metric("truedraft_generation_tokens_total") == generated + 28


def test_settings_are_sent(browser: Browser, server: RunningServer) -> None:
    """What is left empty is left to the server; a chat goes on until it ends."""
    numbers = {"top_k": "7", "min_p": "0.25", "top_p": "0.5", "presence_penalty": "1", "seed": "3"}
    with page(browser, server):
        send(browser)
        asked = server.messages_to_worker("Generate")[-1]
        assert "max_tokens=512" not in asked
        assert figures(browser)[0]["ended"] == "context is full"
        assert "temperature=1.0," in asked
        assert "top_k=0," in asked
        browser.click("#settings-button")
        for name, value in (numbers | {"max_tokens": "4", "temperature": "0.5", "method": "none"}).items():
            browser.fill(f"#settings [name={name}]", value)
        browser.fill("[name=system]", "Be brief.")
        browser.click("#new-chat")
        send(browser)
        asked = server.messages_to_worker("Generate")[-1]
        for field in ("max_tokens=4,", "temperature=0.5", "top_k=7", "min_p=0.25", "top_p=0.5", "seed=3"):
            assert field in asked
        assert "presence_penalty=1.0" in asked
        assert "num_speculative_tokens=0" in asked
        assert last_prompt(server).startswith(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello"
        )


def test_what_the_server_leaves_out_is_said(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """This template has no variable for reasoning."""
    folder = write_tokenizer(
        tmp_path_factory.mktemp("models") / MODEL,
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    log = tmp_path_factory.mktemp("log")
    with run_server(folder, load_tokenizer(str(folder)), log) as server, page(browser, server):
        browser.fill("[name=max_tokens]", "4")
        browser.fill("[name=reasoning_effort]", "low")
        send(browser)
        assert "The server left out: reasoning_effort." in browser.text(".assistant .notice")


def test_edit_and_regenerate(browser: Browser, server: RunningServer) -> None:
    """Either takes back what came after."""
    with page(browser, server):
        browser.fill("[name=max_tokens]", "4")
        for message in ("first", "second"):
            send(browser, message)
        press_button(browser, "Regenerate", 1)
        assert turns(browser) == ["first", "Hell"]
        assert "second" not in last_prompt(server)
        send(browser, "second")
        press_button(browser, "Edit", 0)
        browser.fill(".user textarea", "changed")
        browser.press("Enter")
        wait_for_answer(browser)
        assert turns(browser) == ["changed", "Hell"]
        assert "first" not in last_prompt(server)
        press_button(browser, "Edit", 0)
        browser.press("Escape")
        assert turns(browser) == ["changed", "Hell"]


def test_stop(browser: Browser, start_server: StartServer) -> None:
    """What has come so far stays, and the chat can go on."""
    with start_server() as server, page(browser, server):
        server.worker.at_most(2)
        browser.click("[name=view][value=tokens]")
        browser.fill("#prompt", "Hello")
        browser.click("#send")
        browser.wait("document.querySelectorAll('.token').length === 8")
        browser.click("[name=view][value=text]")  # while it runs
        browser.wait("document.querySelector('.prose').textContent === 'Hello, w'")
        browser.press("Escape")
        wait_for_answer(browser)
        assert figures(browser)[0]["ended"] == "stopped by you"
        server.wait_for_messages("Abort", 1)  # its steps would be counted
        press_button(browser, "Regenerate", wait=False)
        server.worker.at_most(5)
        browser.wait("document.querySelector('.prose')?.textContent === 'Hello, wörl'")
        browser.open(f"{server.url}/")  # in the middle of it
        wait_until_ready(browser)
        assert turns(browser) == ["Hello", "Hello, wörl"]
        assert figures(browser)[0]["ended"] == "as the page was left"
        server.worker.go_on()
        server.wait_for_requests(0)
        browser.fill("[name=max_tokens]", "4")
        send(browser, "Go on.")
        assert "Hello, wörl<|im_end|>" in last_prompt(server)


def test_escape_stops_only_what_nothing_else_takes_it_from(
    browser: Browser, start_server: StartServer
) -> None:
    """A dialog, a card that stays, a text that is composed and another view have keys of their own."""
    with start_server() as server, page(browser, server):
        server.worker.at_most(2)
        browser.click("[name=view][value=tokens]")
        browser.fill("#prompt", "Hello")
        browser.click("#send")
        browser.wait("document.querySelectorAll('.token').length === 8")
        for opener, dialog in (("#server", "#about-dialog"), ("#code", "#code-dialog")):
            browser.click(opener)
            browser.wait(f"document.querySelector('{dialog}').open")
            browser.press("Escape")
            browser.wait(f"!document.querySelector('{dialog}').open")
        browser.click(".token")
        browser.press("Escape")
        assert browser.run("document.querySelector('#token-card').hidden")
        browser.run(
            "document.querySelector('#prompt').dispatchEvent("
            "new KeyboardEvent('keydown', {key: 'Escape', isComposing: true, bubbles: true}))"
        )
        browser.click("#tab-live")
        browser.press("Escape")
        browser.click("#tab-chat")
        assert not browser.run("document.querySelector('#stop').hidden")
        browser.press("Escape")
        wait_for_answer(browser)
        assert figures(browser)[0]["ended"] == "stopped by you"
        server.worker.go_on()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_view_follows_to_the_very_end(browser: Browser, start_server: StartServer, width: int) -> None:
    """Figures and buttons come last; none of it may lie under the box. Who reads above is left there."""
    gap = (
        "document.querySelector('.dock').getBoundingClientRect().top"
        " - [...document.querySelectorAll('.turn-actions')].at(-1).getBoundingClientRect().bottom"
    )
    with start_server("--text", "A line.\n\n", "--max-model-len", "4000") as server, page(browser, server):
        browser.look(width=width, height=700)
        browser.fill("[name=max_tokens]", "400")
        for view in ("text", "tokens"):
            browser.click(f"[name=view][value={view}]")
            send(browser)
            browser.wait(f"{gap} >= 0")
            assert browser.run("scrollY") > 0
        browser.fill("#prompt", "one\n" * 6)
        browser.wait("document.querySelector('#prompt').offsetHeight > 100")
        browser.wait(f"{gap} >= 0")
        browser.fill("#prompt", "More")
        server.worker.at_most(0)
        browser.click("#send")
        browser.wait("document.querySelectorAll('.assistant').length === 3")
        browser.run("scrollTo(0, 0)")
        server.worker.go_on()
        wait_for_answer(browser)
        assert browser.run("scrollY") == 0


def test_other_views_begin_at_their_top(browser: Browser, start_server: StartServer) -> None:
    """A conversation that goes on meanwhile moves nothing, and is shown from its end again."""
    with start_server("--text", "A line.\n\n", "--max-model-len", "4000") as server, page(browser, server):
        browser.look(width=390, height=700)
        browser.fill("[name=max_tokens]", "400")
        send(browser)
        assert browser.run("scrollY") > 0
        server.worker.at_most(0)
        browser.fill("#prompt", "More")
        browser.click("#send")
        browser.click("#tab-race")
        assert browser.run("scrollY") == 0
        server.worker.go_on()
        wait_for_answer(browser)
        assert browser.run("scrollY") == 0
        browser.click("#tab-chat")
        browser.wait("innerHeight + scrollY > document.documentElement.scrollHeight - 80")
        browser.open(f"{server.url}/#/race")
        wait_until_ready(browser)
        assert browser.run("scrollY") == 0


def test_a_lost_server_is_waited_for(browser: Browser, start_server: StartServer) -> None:
    """What has come stays, and the answer goes on from it when the server is back."""
    with start_server() as server, page(browser, server):
        server.worker.at_most(2)
        browser.fill("[name=max_tokens]", "20")
        browser.fill("#prompt", "Hello")
        browser.click("#send")
        browser.wait("document.querySelector('.prose')?.textContent === 'Hello, w'")
        # The page need not wait for its next look to know that there is no server.
        browser.run("for (let id = setTimeout(() => {}); id; id -= 1) clearTimeout(id)")
        browser.connect(is_there=False)
        server.drop_connections()
        wait_for_answer(browser)
        browser.wait("document.querySelector('#retry').disabled")
        lost = "The connection to the server was lost."
        assert browser.text("#error-text") == f"{lost} This page waits for the server."
        assert figures(browser)[0]["ended"] == "as the connection was lost"
        browser.connect(is_there=True)
        browser.wait("!document.querySelector('#retry').disabled")
        assert browser.text("#error-text") == f"{lost} The server is there again."
        assert browser.text("#retry") == "Continue"
        server.worker.go_on()
        browser.click("#retry")
        wait_for_answer(browser)
        assert turns(browser) == ["Hello", f"Hello, w{TEXT.rstrip()}"]
        assert last_prompt(server).endswith("<|im_start|>assistant\nHello, w")
        assert figures(browser)[0]["tokens"] == "28"
        assert "drafts accepted" not in figures(browser)[0]  # nobody counted those of the first part
        assert browser.run("document.querySelector('#error').hidden")
        browser.problems.clear()  # the browser notes each request that failed


def test_a_server_that_is_lost_before_it_answers(browser: Browser, server: RunningServer) -> None:
    with page(browser, server):
        browser.connect(is_there=False)
        browser.fill("[name=max_tokens]", "4")
        send(browser)
        browser.wait("document.querySelector('#retry').disabled")
        browser.click("#tab-race")
        browser.click("#start-race")
        browser.wait("document.querySelector('#verdict').textContent.includes('connection')")
        browser.connect(is_there=True)
        browser.wait("!document.querySelector('#retry').disabled")
        assert browser.text("#retry") == "Try again"
        browser.click("#tab-chat")
        browser.click("#retry")
        browser.wait("document.querySelectorAll('.assistant').length === 1")
        wait_for_answer(browser)
        assert turns(browser) == ["Hello", "Hell"]
        browser.problems.clear()  # the browser notes each request that failed


@pytest.mark.parametrize("hides_first", [False, True])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_reload_in_mid_answer_is_explained(
    browser: Browser, start_server: StartServer, num_steps: int, hides_first: bool
) -> None:
    """Some browsers hide the page first, others break off the answer first."""
    with start_server() as server, page(browser, server):
        server.worker.at_most(num_steps)
        browser.fill("[name=max_tokens]", "12")
        browser.fill("#prompt", "Hello")
        browser.click("#send")
        server.wait_for_messages("Generate", 1)
        if num_steps:
            browser.wait("document.querySelector('.prose')?.textContent === 'Hello, w'")
        kept = browser.run("(dispatchEvent(new Event('pagehide')), sessionStorage.left)")
        source = f"sessionStorage.left = {json.dumps(kept)}" if hides_first else ""
        script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=source)
        browser.run("window.isOld = true")
        browser.call("Page.reload")
        browser.wait("!window.isOld && document.querySelector('#totals') !== null")
        browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)
        wait_until_ready(browser)
        why = "The page was left before this answer was complete."
        assert browser.text("#error-text") == (why if num_steps else "The last message has no answer yet.")
        assert browser.text("#retry") == ("Continue" if num_steps else "Try again")
        server.worker.go_on()
        browser.click("#retry")
        browser.wait("document.querySelectorAll('.assistant').length === 1")
        wait_for_answer(browser)
        assert turns(browser) == ["Hello", ("Hello, w" if num_steps else "") + TEXT[:11]]


@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_an_answer_that_was_cut_goes_on(browser: Browser, server: RunningServer, mode: str) -> None:
    """Its figures are then about all of it. One that ended, or that must be JSON, offers nothing."""
    with page(browser, server):
        browser.click(f"[name=mode][value={mode}]")
        browser.fill("[name=max_tokens]", "8")
        send(browser)
        assert "".join(tokens(browser)) == "Hello, w"
        browser.click(".token")
        browser.wait("document.querySelectorAll('#token-card meter').length >= 5")
        press_button(browser, "Continue")
        assert [sum(legend.values()) for legend in legends(browser)] == [16]
        assert "".join(tokens(browser)) == "Hello, w" * 2
        assert figures(browser)[0]["tokens"] == "16"
        assert figures(browser)[0]["drafts accepted"] == "12 of 12 (100%)"
        assert figures(browser)[0]["tokens per drafting round"] == "4.00"
        begun = {"chat": "<|im_start|>assistant\nHello, w", "completion": "HelloHello, w"}[mode]
        assert last_prompt(server).endswith(begun)
        browser.run("document.querySelector('.turn .text').focus()")
        browser.press("ArrowRight")
        browser.press("Enter")
        browser.wait("document.querySelectorAll('#token-card meter').length >= 5")
        assert texts(browser, "#token-card .chosen span") == ['"H"']
        offered = "[...document.querySelectorAll('.turn button')].some(b => b.textContent === 'Continue')"
        assert browser.run(offered)
        browser.fill("[name=format]", "json_object")
        send(browser)
        assert not browser.run(offered)


def test_numbers_are_checked_before_they_are_sent(browser: Browser, server: RunningServer) -> None:
    num_before = len(server.messages_to_worker("Generate"))
    with page(browser, server):
        browser.fill("#prompt", "Hello")
        for name, value, words in (
            ("max_tokens", "-5", "“Max tokens” must be a whole number of at least 1."),
            ("max_tokens", "1.5", "“Max tokens” must be a whole number of at least 1."),
            ("temperature", "3", "“Temperature” must be a number from 0 to 2."),
            ("num_speculative_tokens", "33", "“Draft length” must be a whole number from 0 to 32."),
        ):
            browser.fill(f"#settings [name={name}]", value)
            browser.click("#code")
            browser.wait(f"document.querySelector('#error-text').textContent === {json.dumps(words)}")
            browser.fill(f"#settings [name={name}]", "")
        browser.fill("#settings [name=temperature]", "-1")
        browser.click("#send")
        browser.wait("document.querySelector('#error-text').textContent.includes('Temperature')")
        assert len(server.messages_to_worker("Generate")) == num_before
        browser.fill("#settings [name=temperature]", "0.75")  # a step of the arrows is not a bound
        browser.fill("[name=max_tokens]", "4")
        browser.click("#retry")
        browser.wait("document.querySelectorAll('.assistant').length === 1")
        wait_for_answer(browser)
        assert "temperature=0.75" in server.messages_to_worker("Generate")[-1]


def test_the_code_has_only_what_was_written(browser: Browser, server: RunningServer) -> None:
    with page(browser, server):
        browser.click("#code")
        browser.wait("document.querySelector('#error-text').textContent.startsWith('Write a message first')")
        browser.fill("[name=max_tokens]", "4")
        send(browser, "mine")
        for typed, messages in (("", ["mine"]), ("next", ["mine", "Hell", "next"])):
            browser.fill("#prompt", typed)
            browser.click("#code")
            browser.wait("document.querySelector('#code-dialog').open")
            body = browser.text("#code-text").partition("-d '")[2].rstrip("'")
            assert [message["content"] for message in json.loads(body)["messages"]] == messages
            browser.click("#code-form [type=submit]")


def test_a_reload_keeps_the_conversation(browser: Browser, server: RunningServer) -> None:
    """Settings stay, too, in this tab."""
    with page(browser, server):
        browser.fill("[name=max_tokens]", "8")
        send(browser, "keep me")
        before = turns(browser), legends(browser), figures(browser), browser.text("#totals")
        browser.open(f"{server.url}/")
        wait_until_ready(browser)
        assert browser.run("document.querySelectorAll('.token').length") == 8  # the view is kept, too
        browser.click("[name=view][value=text]")
        assert (turns(browser), legends(browser), figures(browser), browser.text("#totals")) == before
        browser.click("[name=view][value=text]")
        send(browser, "more")
        assert "keep me" in last_prompt(server)
        assert figures(browser)[1]["tokens"] == "8"
        browser.click("#new-chat")
        assert browser.run("localStorage.length") == 0
        browser.open(f"{server.url}/")
        wait_until_ready(browser)
        assert "begin with one of these" in browser.text("#transcript")


def test_without_a_database_the_tab_keeps_the_conversation(browser: Browser, server: RunningServer) -> None:
    """The page says so. Where there is too little room for what is known of each token, the text stays."""
    none = """Object.defineProperty(window, "indexedDB", {get: () => { throw new Error("none"); }});
    Storage.prototype.setItem = ((set) => function (name, value) {
        if (value.length > 3000) throw new Error("full");
        set.call(this, name, value);
    })(Storage.prototype.setItem)"""
    with page(browser, server):
        script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=none)
        browser.open(f"{server.url}/")
        wait_until_ready(browser)
        browser.fill("[name=max_tokens]", "40")
        send(browser)
        browser.wait("!document.querySelector('#not-kept').hidden")
        before = turns(browser), figures(browser)
        assert len(tokens(browser)) == 40
        browser.click("[name=view][value=text]")
        browser.open(f"{server.url}/")
        wait_until_ready(browser)
        assert (turns(browser), figures(browser)) == before
        browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)


def test_an_error_is_shown_and_can_be_tried_again(browser: Browser, server: RunningServer) -> None:
    with page(browser, server):
        browser.fill("[name=max_tokens]", "4")
        browser.fill("[name=stop]", "\n".join(f"stop {number}" for number in range(65)))
        send(browser)
        assert "max_stop_strings" in browser.text("#error")
        browser.fill("[name=stop]", "")
        browser.fill("[name=tools]", "[{")
        browser.click("#retry")
        browser.wait("document.querySelector('#error').textContent.includes('list of tools')")
        browser.fill("[name=tools]", "")
        browser.click("#retry")
        browser.wait("document.querySelectorAll('.assistant .figures > div').length > 4")
        wait_for_answer(browser)
        assert browser.run("document.querySelector('#error').hidden")
        assert turns(browser) == ["Hello", "Hell"]
        browser.problems.clear()  # the browser notes the status 400


def test_the_code_of_a_request_runs(browser: Browser, server: RunningServer) -> None:
    """Both forms ask the same as the page did, whatever the message has in it."""
    message = "it's \"$HOME\" `x` \\n 'é' 😀\nnew {line}"
    with page(browser, server):
        for name, value in (("max_tokens", "8"), ("top_k", "9"), ("system", "Be 'brief'.")):
            browser.fill(f"#settings [name={name}]", value)
        browser.fill("[name=stream]", False)
        send(browser, message)
        asked = server.messages_to_worker("Generate")[-1].partition("prompt_token_ids=")[2]
        press_button(browser, "Code")
        for language, command in (("curl", ["bash", "-c"]), ("python", [sys.executable, "-c"])):
            browser.click(f"[name=language][value={language}]")
            done = subprocess.run(
                [*command, browser.text("#code-text")], capture_output=True, text=True, check=True
            )
            assert "Hello, w" in done.stdout
            again = server.messages_to_worker("Generate")[-1].partition("prompt_token_ids=")[2]
            # The page asks for the origins of tokens besides.
            assert again.replace("origins=False", "origins=True") == asked
        clipboard = "{value: {writeText: async text => window.copied = text}}"
        browser.run(f"Object.defineProperty(navigator, 'clipboard', {clipboard})")
        browser.click("#copy-code button")
        assert browser.run("window.copied") == browser.text("#code-text")
        browser.click("#code-form [type=submit]")
        press_button(browser, "Copy")
        assert browser.run("window.copied") == "Hello, w"


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_folds_away(browser: Browser, speaking: RunningServer, stream: bool) -> None:
    with page(browser, speaking):
        browser.fill("[name=stream]", stream)
        for turn in (1, 2):
            send(browser)
            assert turns(browser)[1::2] == ["Wörld 😀."] * turn
            assert texts(browser, ".thoughts") == ["Hm, 2."] * turn
            assert (
                browser.run("[...document.querySelectorAll('details.reasoning')].map(d => d.open)")
                == [False] * turn
            )
        thoughts = "[...document.querySelectorAll('.thoughts')].at(-1).textContent"
        assert "".join(tokens(browser)).replace("\u25aa", "") == "Wörld 😀."
        assert browser.run(thoughts) == THOUGHT
        assert [str(sum(legend.values())) for legend in legends(browser)] == [
            answer["tokens"] for answer in figures(browser)
        ]
        assert "<think>Hm, 2.</think>Wörld 😀.;" in last_prompt(speaking)


def test_function_calls_are_shown_and_answered(browser: Browser, speaking: RunningServer) -> None:
    with page(browser, speaking):
        browser.fill("[name=tools]", json.dumps([TOOL]))
        send(browser, "Add.")
        assert texts(browser, ".call > p") == ["Calls add"] * 2
        assert texts(browser, ".call dt") == ["a", "b"] * 2
        assert texts(browser, ".call dd") == ["1", "ü"] * 2
        assert figures(browser)[0]["ended"] == "with a function call"
        browser.run(
            "document.querySelectorAll('.results textarea').forEach((box, n) => box.value = `sum ${n}`)"
        )
        press_button(browser, "Send results")
        assert texts(browser, ".result pre") == ["sum 0", "sum 1"]
        assert turns(browser)[-1] == "Both are 3."
        assert "tool:sum 0=add;tool:sum 1=add;" in last_prompt(speaking)  # each by its call's id
        assert last_prompt(speaking).count('<tool_call>{"name": "add", "arguments": {"a": 1, "b": ') == 2
        browser.fill("[name=tool_choice]", "none")
        browser.click("#new-chat")
        send(browser, "Add.")
        assert "[add]" not in last_prompt(speaking)


def test_json_is_asked_for_and_shown(browser: Browser, speaking: RunningServer) -> None:
    with page(browser, speaking):
        browser.fill("[name=format]", "json_schema")
        browser.run("document.querySelector('#schema-field button').click()")
        assert json.loads(browser.run("document.querySelector('[name=schema]').value"))["type"] == "object"
        send(browser, "json")
        assert texts(browser, ".prose .code pre") == ['{\n  "a": [\n    1,\n    2\n  ]\n}']
        assert "age" in speaking.messages_to_worker("Generate")[-1]
        browser.fill("[name=format]", "json_object")
        send(browser, "json")
        assert "grammar=None" not in speaking.messages_to_worker("Generate")[-1]


def test_probabilities_come_when_they_are_asked_for(browser: Browser, server: RunningServer) -> None:
    """A click asks the target about the finished text; the box asks both models while it is generated."""
    with page(browser, server):
        browser.fill("[name=max_tokens]", "8")
        send(browser)
        assert "trace=True" not in server.messages_to_worker("Generate")[-1]
        num_before = len(server.messages_to_worker("Generate"))
        assert len(tokens(browser)) == 8
        browser.run("document.querySelector('.turn .text').focus()")
        for _ in range(4):
            browser.press("ArrowRight")
        card = browser.text("#token-card")
        assert '"l" token 4 · id 108bonus' in card
        assert "Click for" in card
        assert browser.run("document.querySelector('#token-card meter')") is None
        assert len(server.messages_to_worker("Generate")) == num_before
        browser.press("Enter")
        browser.wait("document.querySelectorAll('#token-card meter').length >= 5")
        assert texts(browser, "#token-card .chosen span") == ['"l"']
        for key in ("ArrowRight", "ArrowRight", "Enter"):
            browser.press(key)
        browser.wait("document.querySelectorAll('#token-card meter').length >= 5")
        assert texts(browser, "#token-card .chosen span") == ['","']
        browser.press("Escape")
        assert browser.run("document.querySelector('#token-card').hidden")
        browser.fill("[name=probabilities]", True)
        press_button(browser, "Regenerate")
        assert "trace=True" in server.messages_to_worker("Generate")[-1]
        browser.run("document.querySelector('.turn .text').focus()")
        browser.press("ArrowRight")
        assert texts(browser, "#token-card .probability") == ["target model0.500", "draft0.250"]


def test_a_model_without_a_template_completes(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_tokenizer(tmp_path_factory.mktemp("models") / MODEL, chat_template=None)
    log = tmp_path_factory.mktemp("log")
    with run_server(folder, load_tokenizer(str(folder)), log) as server, page(browser, server):
        assert browser.run("document.querySelector('[name=mode][value=chat]').disabled")
        assert not browser.run("document.querySelector('#no-chat').hidden")
        assert browser.run("document.querySelector('#race [name=kind]').value") == "completion"
        send(browser, "Once")
        assert texts(browser, ".given, .prose")[0] == "Once"
        assert figures(browser)[0]["tokens"] == "256"
        assert last_prompt(server) == "Once"
