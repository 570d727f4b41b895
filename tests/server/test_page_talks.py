"""A real browser keeps several conversations: their names, versions, files, exports; code has colours."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser import Browser
from tests.server.conftest import StartServer
from tests.server.page_user import (
    FAINT,
    figures,
    last_prompt,
    page,
    press_button,
    send,
    texts,
    turns,
    wait_for_answer,
    wait_until_ready,
)
from tests.server.running import RunningServer

NAMES = "[...document.querySelectorAll('#talk-list .name')].map(name => name.textContent)"
CODE = "```python\ndef f(x):  # why\n    return 'a' + str(1)\n```\n\n```unheard\n<b>1</b>\n```\n"


def names(browser: Browser) -> list[str]:
    return list(browser.run(NAMES))


def open_talk(browser: Browser, name: str) -> None:
    found = f"find(row => row.textContent === {json.dumps(name)})"
    browser.run(f"[...document.querySelectorAll('#talk-list .name')].{found}.click()")


def act(browser: Browser, name: str) -> None:
    """Clicks a button of the conversation that is shown, in the list."""
    browser.run(
        "[...document.querySelectorAll('#talk-list .turn-actions button')]"
        f".find(button => button.textContent === {json.dumps(name)}).click()"
    )


def start_list(browser: Browser) -> None:
    browser.click("#talks-button")
    browser.fill("[name=max_tokens]", "4")


def give_files(browser: Browser, selector: str, files: dict[str, str | list[int]]) -> None:
    """Chooses files as a person does in the browser's dialog; bytes are given as a list."""
    made = ", ".join(
        f"new File([{json.dumps(data) if isinstance(data, str) else f'new Uint8Array({data})'}], "
        f"{json.dumps(name)})"
        for name, data in files.items()
    )
    browser.run(
        "(() => { const carrier = new DataTransfer();"
        f"for (const file of [{made}]) carrier.items.add(file);"
        f"const input = document.querySelector({json.dumps(selector)});"
        "input.files = carrier.files; input.dispatchEvent(new Event('change')); })()"
    )


def kept_talks(browser: Browser) -> list[dict[str, Any]]:
    """Returns what the browser's database holds."""
    return list(
        browser.run(
            "new Promise((resolve, reject) => { const opening = indexedDB.open('truedraft');"
            "opening.onerror = reject; opening.onsuccess = () => { const database = opening.result;"
            "database.onversionchange = () => database.close();"
            "const all = database.transaction('conversations').objectStore('conversations').getAll();"
            "all.onsuccess = () => { database.close(); resolve(all.result); } } })"
        )
    )


def test_several_conversations_are_kept_with_names(browser: Browser, server: RunningServer) -> None:
    """They outlive the tab: its own storage is forgotten here before the page opens again."""
    with page(browser, server):
        start_list(browser)
        send(browser, "first")
        browser.click("#new-chat")
        assert browser.run("document.activeElement.id") == "prompt"
        send(browser, "second")
        assert names(browser) == ["second", "first"]
        assert "first" not in last_prompt(server)
        act(browser, "Rename")
        browser.type("My own")
        browser.press("Enter")
        browser.wait(f"{NAMES}[0] === 'My own'")
        act(browser, "Rename")
        browser.type("Not this")
        browser.press("Escape")
        browser.wait("document.querySelector('#talk-list input') === null")
        assert names(browser) == ["My own", "first"]
        open_talk(browser, "first")
        assert turns(browser) == ["first", "Hell"]
        browser.run("sessionStorage.clear()")
        script = browser.call(
            "Page.addScriptToEvaluateOnNewDocument",
            source="location.origin === 'null' || sessionStorage.clear()",
        )
        browser.open(f"{server.url}/")
        browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)
        wait_until_ready(browser)
        assert turns(browser) == []
        browser.click("#talks-button")
        assert names(browser) == ["My own", "first"]
        open_talk(browser, "first")
        browser.fill("[name=max_tokens]", "4")
        send(browser, "more")
        assert "first" in last_prompt(server)
        assert names(browser) == ["first", "My own"]  # the one that changed last comes first


def test_what_is_deleted_is_gone_unless_it_is_undone(browser: Browser, server: RunningServer) -> None:
    with page(browser, server):
        start_list(browser)
        for message in ("first", "second"):
            browser.click("#new-chat")
            send(browser, message)
        act(browser, "Delete")
        browser.wait(f"{NAMES}.length === 1")
        assert turns(browser) == []
        browser.click("#undo")
        browser.wait(f"{NAMES}.length === 2")
        assert turns(browser) == ["second", "Hell"]
        act(browser, "Delete")
        browser.wait(f"{NAMES}.length === 1")
        assert [talk["turns"][0]["content"] for talk in kept_talks(browser)] == ["first"]
        browser.open(f"{server.url}/")
        wait_until_ready(browser)
        assert names(browser) == ["first"]
        assert "second" not in browser.run("JSON.stringify({...sessionStorage})")


def test_an_answer_goes_on_while_another_conversation_is_shown(
    browser: Browser, start_server: StartServer
) -> None:
    """Each has one answer at a time; one that is deleted stops and is not saved."""
    with start_server() as server, page(browser, server):
        browser.click("#talks-button")
        browser.fill("[name=max_tokens]", "12")
        server.worker.at_most(2)
        browser.fill("#prompt", "first")
        browser.click("#send")
        browser.wait("document.querySelector('.prose')?.textContent === 'Hello, w'")
        browser.click("#new-chat")
        assert browser.run("document.querySelector('#stop').hidden")
        server.worker.go_on()
        send(browser, "second")
        assert turns(browser) == ["second", "Hello, wörl"]
        open_talk(browser, "first")
        wait_for_answer(browser)
        assert turns(browser) == ["first", "Hello, wörl"]
        assert figures(browser)[0]["ended"] == "at max tokens"
        server.worker.at_most(0)
        browser.fill("#prompt", "third")
        browser.click("#send")
        server.wait_for_messages("Generate", 3)
        act(browser, "Delete")
        server.wait_for_messages("Abort", 1)
        browser.wait(f"{NAMES}.length === 1")
        server.worker.go_on()
        assert [talk["turns"][0]["content"] for talk in kept_talks(browser)] == ["second"]


def test_versions_come_back_with_what_followed(browser: Browser, server: RunningServer) -> None:
    """A regenerated answer and an edited message keep what stood there. What is refused takes no place."""
    shown = "[...document.querySelectorAll('.versions')].map(e => e.textContent)"
    with page(browser, server):
        browser.fill("[name=max_tokens]", "4")
        send(browser, "one")
        send(browser, "two")
        browser.fill("[name=max_tokens]", "8")
        press_button(browser, "Regenerate", 1)
        assert turns(browser) == ["one", "Hello, w"]
        assert browser.run(shown) == ["2 of 2"]
        press_button(browser, "‹", 1)
        assert turns(browser) == ["one", "Hell", "two", "Hell"]
        assert browser.run(shown) == ["1 of 2"]
        press_button(browser, "Edit", 2)
        browser.fill(".user textarea", "2")
        browser.press("Enter")
        wait_for_answer(browser)
        assert turns(browser) == ["one", "Hell", "2", "Hello, w"]
        assert browser.run(shown) == ["1 of 2", "2 of 2"]
        browser.fill("[name=stop]", "\n".join(f"stop {number}" for number in range(65)))
        press_button(browser, "Regenerate", 1)  # the server refuses it
        assert "max_stop_strings" in browser.text("#error")
        assert turns(browser) == ["one", "Hell", "2", "Hello, w"]
        browser.fill("[name=stop]", "")
        browser.open(f"{server.url}/")
        wait_until_ready(browser)
        press_button(browser, "›", 1)
        assert turns(browser) == ["one", "Hello, w"]
        press_button(browser, "‹", 1)
        press_button(browser, "‹", 2)
        assert turns(browser) == ["one", "Hell", "two", "Hell"]
        browser.problems.clear()  # the browser notes the status 400


def test_export_and_import(browser: Browser, server: RunningServer) -> None:
    """What comes back is the same, versions included; a file of something else is refused in a sentence."""
    with page(browser, server):
        start_list(browser)
        send(browser, "first")
        press_button(browser, "Regenerate")
        made = "URL.createObjectURL = file => (file.text().then(text => window.saved = text), 'blob:none')"
        browser.run(f"HTMLAnchorElement.prototype.click = () => {{}}; {made}; 0")
        browser.click("#export")
        browser.wait("window.saved !== undefined")
        saved = browser.run("window.saved")
        assert json.loads(saved)["format"] == "truedraft conversations"
        before = kept_talks(browser)
        give_files(browser, "#import-file", {"same.json": saved})
        browser.wait("document.querySelector('#import-file').value === ''")
        assert names(browser) == ["first"]  # it is here already
        act(browser, "Delete")
        browser.wait(f"{NAMES}.length === 0")
        give_files(browser, "#import-file", {"saved.json": saved})
        browser.wait(f"{NAMES}.length === 1")
        browser.wait("document.querySelectorAll('.turn').length === 2")
        assert turns(browser) == ["first", "Hell"]
        assert browser.text(".versions") == "2 of 2"
        again = kept_talks(browser)
        for talks in (before, again):
            talks[0].pop("changed")
        assert again == before
        for name, text in (
            ("notes.json", "{}"),
            ("text.json", "hello"),
            ("odd.json", json.dumps(json.loads(saved) | {"conversations": [{"id": "1", "mode": "chat"}]})),
            ("role.json", saved.replace('"assistant"', '"boss"')),
        ):
            give_files(browser, "#import-file", {name: text})
            browser.wait(f"document.querySelector('#error-text').textContent.startsWith('{name} is not')")
        assert names(browser) == ["first"]


def test_an_import_is_text(browser: Browser, server: RunningServer) -> None:
    """Whatever a file has in the place of what the page wrote, nothing of it runs or breaks the page."""
    hostile = "<img src=x onerror='window.hacked=1'>"
    answer = {
        "role": "assistant",
        "content": hostile,
        "tokens": [None, 5, {"text": hostile}],
        "report": {"rounds": hostile},
    }
    user = {"role": "user", "content": hostile, "files": [{"name": hostile, "text": hostile}]}
    talk = {"id": hostile, "mode": "chat", "name": hostile, "turns": [user, answer]}
    given = json.dumps({"format": "truedraft conversations", "conversations": [talk]})
    with page(browser, server):
        start_list(browser)
        give_files(browser, "#import-file", {"a.json": given})
        browser.wait("document.querySelectorAll('.turn').length === 2")
        assert names(browser) == [hostile]
        assert turns(browser) == [hostile, hostile]
        assert browser.run("document.querySelectorAll('main img, main script').length") == 0
        assert figures(browser)[0]["ended"] == "as the page was left"
        browser.click("[name=view][value=tokens]")
        send(browser, "more")
        assert hostile in last_prompt(server)
        assert browser.run("window.hacked") is None


def test_text_files_go_with_a_message(browser: Browser, server: RunningServer) -> None:
    """Each is in a fence that it cannot leave, stays with the message, and is refused if it is no text."""
    with page(browser, server):
        browser.fill("[name=max_tokens]", "4")
        give_files(browser, "#files", {"a.md": "x\n```\ny\n", "b.txt": "Zoë"})
        browser.wait("document.querySelectorAll('#chosen li').length === 2")
        send(browser, "Compare.")
        assert (
            "user\na.md:\n````\nx\n```\ny\n````\n\nb.txt:\n```\nZoë\n```\n\nCompare.<|im_end|>"
            in last_prompt(server)
        )
        assert browser.run("document.querySelector('#chosen').hidden")
        assert texts(browser, ".file summary") == ["a.md", "b.txt"]
        assert turns(browser) == ["Compare.", "Hell"]
        browser.open(f"{server.url}/")
        wait_until_ready(browser)
        assert texts(browser, ".file pre") == ["x\n```\ny\n", "Zoë"]
        for name, data in (("c.png", [137, 80, 255]), ("nul.txt", "a\0b"), ("utf16.txt", [255, 254, 65, 0])):
            give_files(browser, "#files", {name: data})
            browser.wait(
                f"document.querySelector('#error-text').textContent.startsWith('{name} is not a text')"
            )
        give_files(browser, "#files", {"large.txt": "x" * 1_000_001})
        browser.wait("document.querySelector('#error-text').textContent.startsWith('large.txt is too large')")
        give_files(browser, "#files", {"d.txt": "d"})
        browser.wait("document.querySelectorAll('#chosen li').length === 1")
        browser.click("#chosen button")
        assert browser.run("document.querySelector('#chosen').hidden")
        give_files(browser, "#files", {"only.txt": "d"})
        browser.wait("!document.querySelector('#chosen').hidden")
        send(browser, "")
        assert turns(browser)[-1] == "Hell"


def test_code_has_colours(browser: Browser, start_server: StartServer) -> None:
    """They are those of its language; a language that nobody knows has none. All of them can be read."""
    with start_server("--text", CODE, "--once") as server, page(browser, server):
        send(browser)
        browser.wait("document.querySelector('.prose .syntax-keyword') !== null")
        assert texts(browser, ".prose code") == ["def f(x):  # why\n    return 'a' + str(1)", "<b>1</b>"]
        assert texts(browser, ".prose .syntax-keyword") == ["def", "return"]
        assert texts(browser, ".prose .syntax-comment") == ["# why"]
        assert browser.run("document.querySelectorAll('.code:last-child code *').length") == 0
        colours = "[...document.querySelectorAll('.prose code span')].map(e => getComputedStyle(e).color)"
        for theme in ("light", "dark"):
            browser.look(theme=theme)
            assert len(set(browser.run(colours))) >= 5
            assert browser.run(FAINT.replace("SELECTOR", "'.prose *'")) == []


def test_a_model_is_chosen(browser: Browser, start_server: StartServer) -> None:
    """A server of several says in what state each is. The choice stays over a reload."""
    lists = """window.fetch = (fetch => async (path, ...others) => {
        const answer = await fetch(`${path}`.replace('model=other', ''), ...others);
        if (path !== 'v1/models') return answer;
        const { data: [card] } = await answer.json();
        const other = { ...card, id: 'other', tool_form: null, max_model_len: 512 };
        other.status = { value: 'unloaded' };
        return Response.json({ data: [{ ...card, status: { value: 'loaded' } }, other] });
    })(window.fetch)"""
    with start_server() as server, page(browser, server):
        assert browser.run("document.querySelector('#model-field').hidden")  # there is no choice
        script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=lists)
        for _ in range(2):
            browser.open(f"{server.url}/")
            wait_until_ready(browser)
            assert not browser.run("document.querySelector('#model-field').hidden")
            assert browser.run("document.querySelector('#model').options[1].text") == "other (unloaded)"
            browser.fill("#model", "other")
            assert browser.run("document.querySelector('[name=mode][value=chat]').disabled")
        browser.open(f"{server.url}/")
        wait_until_ready(browser)
        assert browser.run("document.querySelector('#model').value") == "other"
        browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)


def test_axe_finds_nothing(browser: Browser, start_server: StartServer) -> None:
    """axe-core looks for what WCAG's A and AA ask of a page, in all views and both colours."""
    package = importlib.util.find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        pytest.skip("no axe-core: make test-extras")
    axe = (Path(package.origin).parent / "axe.min.js").read_text()
    asked = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']}"
    listed = "({violations}) => violations.map(({id, nodes}) => [id, nodes[0].html])"
    found = f"axe.run(document, {asked}).then({listed})"
    with start_server("--text", CODE) as server, page(browser, server):
        browser.fill("[name=max_tokens]", "60")
        give_files(browser, "#files", {"a.txt": "a"})
        browser.wait("document.querySelectorAll('#chosen li').length === 1")
        send(browser, "Read `this`.")
        press_button(browser, "Regenerate")
        browser.wait("document.querySelector('.prose .syntax-keyword') !== null")
        give_files(browser, "#files", {"b.png": [255]})
        for opener in ("#settings-button", "#talks-button"):
            browser.click(opener)
        browser.run(f"{axe}; 0")
        for theme in ("light", "dark"):
            browser.look(theme=theme)
            for tab in ("race", "live", "chat"):
                browser.click(f"#tab-{tab}")
                assert browser.run(found) == [], (theme, tab)
            for view in ("tokens", "text"):
                browser.click(f"[name=view][value={view}]")
                assert browser.run(found) == [], (theme, view)
