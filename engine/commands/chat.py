"""Implements ``truedraft chat``: a conversation in the terminal, by the model's own chat template.

The text streams. Ctrl-C stops an answer, Ctrl-D ends. Where the input is no terminal, each of its lines is a
message and only the answers are printed.
"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from truedraft.engine.commands.options import ChatSettings, check_adapters
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.admission import RequestError
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.llm import LLM, Completion, SamplingParams
from truedraft.engine.models.generation_defaults import recommended
from truedraft.engine.terminal import console, loading_bar, printable

HELP = """\
/system TEXT  set the system prompt; without TEXT, remove it
/reset        begin a new conversation
/stats        show the speed of the last answer, and what speculation did
/exit         leave, as Ctrl-D does; Ctrl-C stops an answer"""
PROMPT = "> "


class StopSwitch:
    """Lets Ctrl-C ask for the end of an answer; a second one interrupts even where no step ends."""

    def __init__(self) -> None:
        self.is_on = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        def handle(number: int, frame: FrameType | None) -> None:
            if self.is_on:
                raise KeyboardInterrupt
            self.is_on = True

        self.is_on = False
        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class Chat:
    """Holds one conversation. ``answer`` and ``command`` take the lines that a person has written."""

    def __init__(self, llm: LLM, settings: ChatSettings, out: Console) -> None:
        self.llm = llm
        self.settings = settings
        self.out = out
        self.system: str | None = None
        self.messages: list[dict[str, str]] = []
        self._stats = "Nothing has been answered yet."
        self._defaults = recommended(settings.generation_config, llm.core.target.model.generation_config)
        if settings.system:
            self.set_system(settings.system)

    def answer(self, text: str) -> None:
        """Prints an answer; the printed part stays in the conversation, even if the answer is stopped."""
        self.messages.append({"role": "user", "content": text})
        completion, begun, stop = Completion(), time.perf_counter(), StopSwitch()
        try:
            with stop.installed():
                for delta in self.llm.stream_chat(self._conversation(), self._params()):
                    completion.add_delta(delta)
                    self._print(delta.text)
                    if stop.is_on:
                        break
        except RequestError as error:
            self.messages.pop()
            self.say(f"{error}. The message is not part of the conversation; /reset begins a new one.")
            return
        except KeyboardInterrupt:
            stop.is_on = True
        self._print("\n")
        self.messages.append({"role": "assistant", "content": completion.text})
        self._stats = _figures(completion, time.perf_counter() - begun)
        if stop.is_on:
            self.say("Stopped.")
        elif completion.finish_reason == "length":
            self.say("The answer is cut: it has as many tokens as it may have.")
        if self.settings.stats:
            self.say(self._stats)

    def command(self, line: str) -> bool:
        """Executes a line that begins with a slash; returns False if the conversation is to end."""
        name, _, text = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self.messages.clear()
                self.say("A new conversation begins.")
            case "/system":
                self.set_system(text.strip())
                self.say("The system prompt is set." if self.system else "There is no system prompt.")
            case "/stats":
                self.say(self._stats)
            case "/help":
                self.say(HELP)
            case _:
                self.say(f"There is no command {name}.\n{HELP}")
        return True

    def set_system(self, text: str) -> None:
        """Sets the system prompt, unless the template would leave it out in silence."""
        self.system = text or None
        if text and not self.llm.chat_template.writes_system:
            self.system = None
            self.say("This model's chat template writes no system prompt.")

    def say(self, text: str) -> None:
        """Prints a note that is not the model's, only where a person can tell it from the answer."""
        where = self.out if self.out.is_terminal else console(stderr=True)
        where.print(Text(printable(text), "dim"), soft_wrap=False)

    def _conversation(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def _params(self) -> SamplingParams:
        settings = self.settings
        room = max(1, self.llm.room(self._conversation()))
        values: dict[str, Any] = {**self._defaults, **settings.asked()}
        most = values.pop("max_new_tokens", None)
        limit = settings.max_tokens or (room if most is None else min(room, int(most)))
        return SamplingParams(max_tokens=min(limit, room), **values)

    def _print(self, text: str) -> None:
        if self.out.is_terminal:
            self.out.print(Text(printable(text)), end="")
        else:
            self.out.file.write(text)
        self.out.file.flush()


def _figures(completion: Completion, seconds: float) -> str:
    num_tokens = len(completion.token_ids)
    tokens = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
    words = f"{tokens} in {seconds:.1f} s, {num_tokens / max(seconds, 1e-9):.1f} tokens/s; "
    if not completion.num_draft_tokens:
        return f"{words}nothing was drafted"
    return (
        f"{words}{completion.num_accepted_tokens} of {completion.num_draft_tokens} drafted tokens accepted "
        f"({completion.acceptance_rate:.0%}), {completion.acceptance_length:.2f} tokens per round"
    )


def main(settings: ChatSettings) -> int:
    transformers_logging.disable_progress_bar()
    try:
        with loading_bar() as begin:
            check_adapters(settings)
            llm = LLM(begin=begin, **{name: getattr(settings, name) for name in EngineConfig.model_fields})
        if not llm.chat_template.exists:
            raise ModelLoadError(
                f"{llm.config.target} has no chat template; continue a text with 'truedraft generate'"
            )
    except ModelLoadError as error:
        print(f"truedraft chat: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    _talk(Chat(llm, settings, console()))
    return 0


def _talk(chat: Chat) -> None:
    is_terminal = sys.stdin.isatty() and chat.out.is_terminal
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - lets input() edit lines and remember them
        chat.say(f"{chat.llm.config.target}\n/help lists commands; Ctrl-D ends.")
    while True:
        try:
            line = input(PROMPT if is_terminal else "").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            chat.say("\nCtrl-D ends.")
            continue
        if line.startswith("/"):
            if not chat.command(line):
                return
        elif line:
            chat.answer(line)
    if is_terminal:
        print()
