"""The ``truedraft`` command picks the subcommand, reads settings, and turns failures into messages.

``serve`` is done by ``server.cli.launch``, ``bench`` by ``loadtest``. The other commands run the engine in
this process and belong to ``engine``; each is imported only when asked for, because it loads torch.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pydantic_settings import BaseSettings

from truedraft.engine.commands.options import (
    ChatSettings,
    CheckSettings,
    GenerateSettings,
    ListSettings,
    PullSettings,
    RemoveSettings,
    ReplaySettings,
    TrainSettings,
)
from truedraft.engine.config_errors import nearest
from truedraft.engine.errors import ConfigError
from truedraft.engine.machine.openmp import spin_settings
from truedraft.server.cli.help import command_help, serve_help
from truedraft.server.cli.interrupts import raise_on_interrupt, say_interrupted
from truedraft.server.cli.settings_sources import load_settings, read_options, target_first
from truedraft.server.observability.logs import configure_logging
from truedraft.server.version import package_version

HELP = """\
usage: truedraft COMMAND [OPTIONS]

OpenAI-compatible inference with exact speculative sampling.

commands:
  serve           start the HTTP server, by default with the bundled demo pair
  chat            talk with a model in the terminal, by its chat template
  generate        generate text in the terminal, without a server
  pull            fetch a model from the hub by its name
  list            list the models that have been fetched, and what serves them
  rm              remove a fetched model
  check           test models before deployment: exactness, acceptance, speed-up
  train-draft     train a head that drafts for a target
  verify-trace    replay a traced answer and confirm every decision in it
  bench           load-test any OpenAI-compatible server

options:
  --version       print the versions of truedraft and torch, device and kernels
  --help          print this help; 'truedraft COMMAND --help' lists the everyday
                  options of a command, and --help-all all of them

examples:
  truedraft serve
  truedraft serve owner/repository:Q4_K_M
  truedraft serve ./my-model --draft ./my-small-model --port 9000
  truedraft serve ./one-model.gguf ./another-model --max-loaded-models 1
  truedraft chat ./my-model.gguf
  truedraft generate "Once upon a time"
  truedraft check ./my-model --draft ./my-small-model
  truedraft verify-trace answer.json
  truedraft bench --base-url http://127.0.0.1:8000/v1 --concurrency 1,16
"""

Run = Callable[[Any], int]  # a command, given its options

HELP_ALL = "--help-all"
HELP_FLAGS = {"--help", "-h", HELP_ALL}
OK, FAILED, WRONG_USAGE = 0, 1, 2
COMMANDS = re.findall(r"^  ([a-z][a-z-]+)  ", HELP.partition("options:")[0], re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_what_is_closed()
    if not _has_folder():
        _complain("truedraft", "The current folder no longer exists. Change to another one.")
        return FAILED
    os.environ.update(spin_settings(os.environ))  # the command may load torch
    match arguments:
        case ["serve", *flags] if HELP_FLAGS & set(flags):
            print(serve_help(is_whole=HELP_ALL in flags), end="")
            return OK
        case ["serve", *flags]:
            return serve(flags)
        case ["generate", *flags]:
            return in_terminal("generate", _load_generate, GenerateSettings, flags)
        case ["chat", *flags]:
            return in_terminal("chat", _load_chat, ChatSettings, target_first(flags))
        case ["pull", *flags]:
            return in_terminal("pull", _load_pull, PullSettings, flags)
        case ["list" | "ls", *flags]:
            return in_terminal("list", _load_list, ListSettings, flags)
        case ["rm" | "remove", *flags]:
            return in_terminal("rm", _load_remove, RemoveSettings, flags)
        case ["check", *flags]:
            return in_terminal("check", _load_check, CheckSettings, target_first(flags))
        case ["train-draft", *flags]:
            return in_terminal("train-draft", _load_train_draft, TrainSettings, flags)
        case ["verify-trace", *flags]:
            return in_terminal("verify-trace", _load_verify_trace, ReplaySettings, flags)
        case ["bench", *flags]:
            return bench(flags)
        case ["--version" | "-V"]:
            from truedraft.engine.commands.about import about

            print(f"truedraft  {package_version()}\n{about()}")
            return OK
        case [] | ["--help" | "-h" | "help"]:
            print(HELP, end="")
            return OK
    _complain("truedraft", _unknown(arguments))
    return WRONG_USAGE


def serve(flags: Sequence[str]) -> int:
    try:
        settings = load_settings(flags)
    except ConfigError as error:
        _complain("truedraft serve", str(error))
        return WRONG_USAGE
    configure_logging(settings.log_level, settings.log_format)
    # With the web framework, which takes seconds to load, once the options are known to be right.
    from prometheus_client import disable_created_metrics

    from truedraft.server.cli.launch import StartError, launch
    from truedraft.server.models.served import TokenizerFailedError
    from truedraft.server.observability.otel import OtelError
    from truedraft.server.workers.worker_pool import WorkerFailedError

    # The *_created series would double the size of /metrics for nothing.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    raise_on_interrupt()
    try:
        return launch(settings)
    except (StartError, WorkerFailedError, TokenizerFailedError, OtelError) as error:
        if settings.log_format == "json":
            logging.getLogger("truedraft.server").error("%s", error)
        else:
            _complain("truedraft serve", str(error))
        return FAILED
    except KeyboardInterrupt:
        return say_interrupted()


def in_terminal(name: str, load: Callable[[], Run], kind: type[BaseSettings], flags: Sequence[str]) -> int:
    """Runs a command with options of its own; ``load`` imports it once its options are known to be right."""
    if HELP_FLAGS & set(flags):
        print(command_help(name, kind, is_whole=HELP_ALL in flags), end="")
        return OK
    try:
        options = read_options(kind, flags)
    except ConfigError as error:
        _complain(f"truedraft {name}", str(error))
        return WRONG_USAGE
    run = load()
    raise_on_interrupt()
    try:
        return run(options)
    except KeyboardInterrupt:
        return say_interrupted()


def _load_generate() -> Run:
    from truedraft.engine.commands.generate import main as generate

    return generate


def _load_chat() -> Run:
    from truedraft.engine.commands.chat import main as chat

    return chat


def _load_check() -> Run:
    from truedraft.engine.commands.check import main as check

    return check


def _load_train_draft() -> Run:
    from truedraft.engine.commands.train_draft import main as train_draft

    return train_draft


def _load_pull() -> Run:
    from truedraft.engine.commands.models import pull

    return pull


def _load_list() -> Run:
    from truedraft.engine.commands.models import list_models

    return list_models


def _load_remove() -> Run:
    from truedraft.engine.commands.models import remove_model

    return remove_model


def _load_verify_trace() -> Run:
    from truedraft.engine.commands.verify_trace import main as verify_trace

    return verify_trace


def bench(flags: Sequence[str]) -> int:
    from truedraft.loadtest.command import main as put_load
    from truedraft.loadtest.options import BenchOptions

    return in_terminal("bench", lambda: put_load, BenchOptions, flags)


def _unknown(arguments: Sequence[str]) -> str:
    """Returns what to say of arguments that name no command."""
    if arguments[0].startswith("-"):
        return (
            f"A command comes first, as in 'truedraft serve {' '.join(arguments)}'. See 'truedraft --help'."
        )
    return f"Unknown command {arguments[0]}.{nearest(arguments[0], COMMANDS) or ' See truedraft --help.'}"


def _open_what_is_closed() -> None:
    """Lets a closed standard stream lead nowhere: the next file that is opened would take its place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, open(number, "r+" if number == 0 else "w"))  # noqa: SIM115


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _complain(command: str, message: str) -> None:
    print(f"{command}: error: {message}", file=sys.stderr)
