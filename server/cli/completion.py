"""``truedraft completion SHELL``: prints a script that completes commands, flags and their choices.

It is made of the commands' own options, and needs no Python when a key is pressed.
"""

from collections.abc import Mapping
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from truedraft.server.cli.settings_sources import flag_name

SHELLS = ("bash", "zsh", "fish")
# Each of a command's flags with what may follow it: choices, or None for anything, such as a file.
Flags = dict[str, "tuple[str, ...] | None"]
# These lines make a shell read it.
INSTALL = {
    "bash": "truedraft completion bash > ~/.local/share/bash-completion/completions/truedraft",
    "zsh": "truedraft completion zsh > ~/.truedraft.zsh; echo 'source ~/.truedraft.zsh' >> ~/.zshrc",
    "fish": "truedraft completion fish > ~/.config/fish/completions/truedraft.fish",
}


def completion_script(shell: str, commands: Mapping[str, type[BaseModel]]) -> str:
    """Returns the script. ``commands`` are those with options, others take none."""
    flags = {command: flags_of(kind) for command, kind in commands.items()}
    flags["completion"] = {}
    return {"bash": bash, "zsh": zsh, "fish": fish}[shell](flags)


def flags_of(kind: type[BaseModel]) -> Flags:
    """Returns the flags of a command's options; a switch takes nothing."""
    found: Flags = {"--help": ()}
    for name, field in kind.model_fields.items():
        if field.is_required():
            continue  # it is positional
        flag = flag_name(name, field)
        if field.annotation is bool:
            found |= {f"--{flag}": (), f"--no-{flag}": ()}
        else:
            found[f"--{flag}"] = _choices(field)
    return found


def _choices(field: FieldInfo) -> tuple[str, ...] | None:
    """Returns the words that a value may be; None where it may be something else, too."""
    parts = get_args(field.annotation) if get_origin(field.annotation) is not Literal else (field.annotation,)
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    is_all = all(get_origin(part) is Literal or part is type(None) for part in parts)
    return tuple(words) if words and is_all else None


def bash(flags: Mapping[str, Flags]) -> str:
    names = " ".join(flags)
    flag_cases = "".join(
        f'        {command}) flags="{" ".join(own)}";;\n' for command, own in flags.items() if own
    )
    value_cases = "".join(
        f'        "{command} {flag}") COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")); return;;\n'
        for command, own in flags.items()
        for flag, words in own.items()
        if words
    )
    file_cases = "".join(
        f'        "{command} {flag}") COMPREPLY=($(compgen -f -- "$word")); return;;\n'
        for command, own in flags.items()
        for flag, words in own.items()
        if words is None
    )
    return f"""\
# {INSTALL["bash"]}
_truedraft() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" flags=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{names} --help --version" -- "$word"))
        return
    fi
    case "$command $before" in
        "completion completion") COMPREPLY=($(compgen -W "{" ".join(SHELLS)}" -- "$word")); return;;
{value_cases}{file_cases}    esac
    case "$command" in
{flag_cases}    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$flags" -- "$word"));;
        *) COMPREPLY=($(compgen -f -- "$word"));;
    esac
}}
complete -o filenames -F _truedraft truedraft
"""


def zsh(flags: Mapping[str, Flags]) -> str:
    """Returns bash's script: zsh reads it with its own compatibility functions."""
    load = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
    return f"# {INSTALL['zsh']}\n{load}" + bash(flags).partition("\n")[2]


def fish(flags: Mapping[str, Flags]) -> str:
    lines = [f"# {INSTALL['fish']}", "complete -c truedraft -n __fish_use_subcommand -f"]
    lines += [f"complete -c truedraft -n __fish_use_subcommand -a {command}" for command in flags]
    lines.append(
        f"complete -c truedraft -n '__fish_seen_subcommand_from completion' -f -a '{' '.join(SHELLS)}'"
    )
    for command, own in flags.items():
        start = f"complete -c truedraft -n '__fish_seen_subcommand_from {command}' -l"
        for flag, words in own.items():
            name = flag.removeprefix("--")
            lines.append(
                f"{start} {name}"
                if words == ()
                else f"{start} {name} -r -F"
                if words is None
                else f"{start} {name} -x -a '{' '.join(words)}'"
            )
    return "\n".join(lines) + "\n"
