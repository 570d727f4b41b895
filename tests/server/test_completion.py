"""``truedraft completion``: what bash offers, and that every command and flag is there for each shell."""

import subprocess
from pathlib import Path

import pytest

from truedraft.server.cli.completion import SHELLS
from truedraft.server.cli.main import HELP, main
from truedraft.server.settings import Settings

COMMANDS = [line.split()[0] for line in HELP.split("commands:\n")[1].split("\n\n")[0].splitlines()]


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    import io
    from contextlib import redirect_stdout

    found = {}
    for shell in SHELLS:
        with redirect_stdout(io.StringIO()) as out:
            assert main(["completion", shell]) == 0
        found[shell] = out.getvalue()
    return found


def offered(script: str, folder: Path, *words: str) -> list[str]:
    """Returns what bash offers for the last word."""
    program = f"""{script}
COMP_WORDS=(truedraft "$@"); COMP_CWORD=$#; _truedraft; printf '%s\\n' "${{COMPREPLY[@]}}" """
    command = ["bash", "-u", "-c", program, "bash", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    assert result.stderr == ""
    return result.stdout.split()


def test_bash_offers_commands_flags_choices_and_files(scripts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()

    def bash(*words: str) -> list[str]:
        return offered(scripts["bash"], tmp_path, *words)

    assert bash("") == [*COMMANDS, "--help", "--version"]
    assert bash("ver") == ["verify-trace"]
    assert bash("serve", "--num-sp") == ["--num-speculative-tokens"]
    assert bash("serve", "--no-prefix") == ["--no-prefix-caching"]
    assert bash("serve", "--verification", "") == ["auto", "rejection", "block", "coupled"]
    assert bash("serve", "--target", "mod") == bash("chat", "mod") == ["model.gguf"]
    assert bash("chat", "--sta") == ["--stats"]
    assert bash("completion", "") == list(SHELLS)
    assert bash("top", "--kv") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_setting_is_there(scripts: dict[str, str], shell: str) -> None:
    script = scripts[shell]
    assert all(command in script for command in COMMANDS)
    dashes = "-l " if shell == "fish" else "--"
    for name in Settings.model_fields:
        assert f"{dashes}{name.replace('_', '-')}" in script


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"]])
def test_one_shell_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *words]) == 2
    assert "Name one shell: bash, zsh, fish." in capsys.readouterr().err
