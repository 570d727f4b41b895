"""Acts on the page as a person does, for its tests: sends messages, reads answers and their figures."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.browser import Browser
from tests.server.running import RunningServer

# Returns the texts that are fainter on their ground than WCAG's AA allows, 4.5 to 1.
FAINT = """(() => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const light = colours => {
        for (const colour of colours) {
            canvas.globalAlpha = colour.alpha;
            canvas.fillStyle = colour.fill;
            canvas.fillRect(0, 0, 1, 1);
        }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
            .map(part => part / 255)
            .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
            .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
    };
    const faint = [];
    for (const element of document.querySelectorAll(SELECTOR)) {
        const hasText = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
        if (!hasText || !element.checkVisibility()) continue;
        const above = [];
        let alpha = 1;
        for (let at = element; at; at = at.parentElement) {
            above.unshift({fill: getComputedStyle(at).backgroundColor, alpha: 1});
            alpha *= getComputedStyle(at).opacity;
        }
        const ground = light(above);
        const text = light([...above, {fill: getComputedStyle(element).color, alpha}]);
        const contrast = (Math.max(ground, text) + 0.05) / (Math.min(ground, text) + 0.05);
        if (contrast < 4.5) faint.push([element.textContent, contrast]);
    }
    return faint;
})()"""


@contextmanager
def page(browser: Browser, server: RunningServer, view: str = "chat") -> Iterator[None]:
    """Opens the page anew, ready for use. At the end nothing may have been refused or thrown."""
    browser.leave()  # the page of a test that failed may still complain
    browser.problems.clear()
    browser.connect(is_there=True)
    browser.look()
    # What an earlier test's page kept, which may have failed anywhere, is forgotten.
    forget = (
        "location.origin === 'null' || "
        "(sessionStorage.clear(), localStorage.clear(), indexedDB.deleteDatabase('truedraft'))"
    )
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=forget)
    browser.open(f"{server.url}/#/{view}")
    browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)
    wait_until_ready(browser)
    yield
    browser.leave()  # while there is a server: a page that asks in vain has problems
    assert not browser.problems, browser.problems


def wait_until_ready(browser: Browser) -> None:
    browser.wait("document.getElementById('model').length > 0")
    browser.wait("document.getElementById('server-text').textContent.includes(' \\u00b7 ')")


def wait_for_answer(browser: Browser) -> None:
    browser.wait("document.querySelector('#stop').hidden")


def send(browser: Browser, message: str = "Hello") -> None:
    """Sends with Enter; returns when the answer is complete."""
    browser.fill("#prompt", message)
    browser.run("document.querySelector('#prompt').focus()")
    browser.press("Enter")
    wait_for_answer(browser)


def press_button(browser: Browser, name: str, turn: int = -1, *, wait: bool = True) -> None:
    """Clicks a button of a turn by its name; waits for the answer, if one follows."""
    browser.run(
        f"[...[...document.querySelectorAll('.turn')].at({turn}).querySelectorAll('button')]"
        f".find(button => button.textContent === {json.dumps(name)}).click()"
    )
    if wait:
        wait_for_answer(browser)


def texts(browser: Browser, selector: str) -> list[str]:
    return list(
        browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
    )


def turns(browser: Browser) -> list[str]:
    """Returns what has been said, in order."""
    return texts(browser, ".bubble, .turn .prose")


def tokens(browser: Browser) -> list[str]:
    """Returns the texts of the tokens of the last answer."""
    browser.click("[name=view][value=tokens]")
    return list(
        browser.run(
            "[...[...document.querySelectorAll('.turn .text')].at(-1).querySelectorAll('.token')]"
            ".map(token => token.textContent)"
        )
    )


def figures(browser: Browser) -> list[dict[str, str]]:
    """Returns the figures below each answer."""
    return list(
        browser.run(
            "[...document.querySelectorAll('.turn .figures')].map(list => Object.fromEntries("
            "[...list.children].map(pair => [...pair.children].map(part => part.textContent))))"
        )
    )


def legends(browser: Browser) -> list[dict[str, int]]:
    """Returns how many tokens of each kind each answer has, as its legend says."""
    browser.click("[name=view][value=tokens]")
    lines = browser.run(
        "[...document.querySelectorAll('.turn .summary')].map("
        "summary => [...summary.querySelectorAll('li')].map(line => line.textContent))"
    )
    return [
        {name: int(count) for name, _, count in (line.rpartition(" ") for line in answer)} for answer in lines
    ]


def last_prompt(server: RunningServer) -> str:
    """Returns the text that the worker was asked to continue last."""
    line = server.messages_to_worker("Generate")[-1]
    ids: Any = json.loads(line.partition("prompt_token_ids=")[2].partition("]")[0] + "]")
    return str(server.post("/detokenize", {"tokens": ids}).json()["prompt"])
