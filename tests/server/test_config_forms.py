"""Forms of settings that people bring from other servers, and the mistakes that must not pass."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.serve_process import ROOT
from truedraft.engine.config import EngineConfig
from truedraft.engine.errors import ConfigError
from truedraft.server.cli import main as cli
from truedraft.server.cli.help import EVERYDAY, serve_help
from truedraft.server.cli.launch import StartError, bind_unix, check_tls
from truedraft.server.cli.settings_sources import load_settings, read_options
from truedraft.server.settings import Settings


def keys(*flags: str) -> list[str]:
    return [key.get_secret_value() for key in load_settings(flags).api_keys]


@pytest.mark.parametrize("given", ["", "k1,", ",k1", "k1,,k2", " "])
def test_an_empty_key_is_no_key(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """It would let in clients that send ``Authorization: Bearer`` and nothing else."""
    with pytest.raises(ConfigError, match="api_keys: one of the keys is empty"):
        load_settings([f"--api-keys={given}"])
    monkeypatch.setenv("TRUEDRAFT_API_KEYS", given)
    with pytest.raises(ConfigError, match="api_keys: one of the keys is empty"):
        load_settings([])


def test_keys_are_ascii() -> None:
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        load_settings(["--api-keys", "schlüssel"])
    assert "schlüssel" not in str(caught.value)


def test_forms_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nthree\n\n  four\n")
    assert keys("--api-key", "one") == ["one"]
    assert keys("--api-key=one", "--api-key-file", str(file)) == ["one", "three", "four"]
    file.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        load_settings(["--api-key-file", str(file)])
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings(["--api-key-file", str(tmp_path / "other")])


def test_the_target_may_come_first(tmp_path: Path) -> None:
    settings = load_settings([str(tmp_path), "--port", "1"])
    assert (settings.target, settings.port) == (str(tmp_path), 1)


def test_a_home_folder_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "c.yaml"
    file.write_text("target: ~/model\ndraft: ~/draft\n")
    settings = load_settings(["--config", str(file)])
    assert (settings.target, settings.draft) == (f"{tmp_path}/model", f"{tmp_path}/draft")
    assert EngineConfig(target="a/~b").target == "a/~b"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ssl-keyfile", "k.pem"], "ssl_certfile and ssl_keyfile must be set together"),
        (["--root-path", "llm"], "root_path must start with a slash"),
        (["--metrics-prefix", "a b"], "metrics_prefix"),
    ],
)
def test_what_does_not_fit_together(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(flags)


def test_help_names_units() -> None:
    text = serve_help(is_whole=True)
    assert "--cache-memory-share NUMBER" in text
    assert "--drain-timeout SECONDS" in text


def test_a_file_is_no_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.safetensors"
    model.touch()
    assert cli.main(["serve", str(model), "--port", "0"]) == 1
    assert "is a file" in capsys.readouterr().err


def test_a_file_of_settings_for_commands_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("target: /models/a\nport: 9\nmax_num_sequences: 4\ndraft: null\n")
    monkeypatch.setenv("TRUEDRAFT_MAX_NUM_SEQUENCES", "5")
    from truedraft.engine.commands.verify_trace import ReplaySettings  # loads torch

    settings = read_options(ReplaySettings, ["a.json", "--config", str(file), "--tolerance", "1"])
    assert (settings.target, settings.max_num_sequences) == ("/models/a", 5)
    assert (str(settings.file), settings.tolerance) == ("a.json", 1)
    settings = read_options(ReplaySettings, [f"--config={file}", "a.json", "--target", "/models/b"])
    assert settings.target == "/models/b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("serve --port", "argument --port: expected one argument."),
        ("serve --port x", "port: must be a whole number"),
        ("serve --cache-memory 12XB", "cache_memory: must be a size such as 512MiB or 4GiB"),
        ("serve --port 1 two", "unrecognized arguments: two."),
        ("generate", "the following arguments are required: PROMPT."),
        ("generate hi --temperature 5", "temperature: must be less"),
        ("generate hi --max-tokens", "argument --max-tokens: expected one argument."),
        ("generate hi --target", "argument --target: expected one argument."),
        ("generate hi --tempratur 1", "Unknown flag --tempratur. Did you mean --temperature?"),
        ("check two words", "unrecognized arguments: words."),
        ("check --jsn", "Unknown flag --jsn. Did you mean --json?"),
        ("check --device-map most", "device_map: must be"),
        ("verify-trace", "the following arguments are required: FILE."),
        ("verify-trace a.json --tolerance 0", "tolerance: must be greater than 0"),
        ("bench --foo", "Unknown flag --foo."),
        ("bench --rate 1,-3", "rate: must be greater than 0, not -3."),
        ("bench --extra-body {", "Parsing error encountered for extra_body: "),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    """Neither a traceback nor a page of usage, whatever the command."""
    command, *rest = arguments.split()
    try:
        code = cli.main([command, *rest])
    except SystemExit as end:
        code = int(end.code or 0)
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert (code, output.out) == (2, "")
    assert line.startswith(f"truedraft {command}: error: {message}")


@pytest.mark.parametrize("command", ["generate", "chat", "check", "train-draft", "verify-trace"])
def test_help_of_a_terminal_command(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """``--help`` has what every day needs of the shared options, and says how many more there are."""
    assert cli.main([command, "--help-all"]) == 0
    whole = capsys.readouterr().out
    assert whole.startswith(f"usage: truedraft {command} ")
    rare = ("--cache-memory-share NUMBER", "--[no-]self-check")
    for expected in (*rare, "--max-num-sequences N"):
        assert expected in whole
    assert "--help-all" not in whole
    assert cli.main([command, "--help"]) == 0
    short = capsys.readouterr().out
    assert "--max-num-sequences N" in short
    assert not [option for option in rare if option in short]
    count = [len(re.findall("^  (?:--|[A-Z])", text, re.MULTILINE)) for text in (whole, short)]
    assert f"--help-all shows {count[0] - count[1]} more options." in short


def test_everyday_options_exist() -> None:
    assert set(EVERYDAY) <= set(Settings.model_fields)


def test_help_and_wrong_usage_load_no_torch() -> None:
    """Nor does any library that takes seconds; each command answers as soon as its options are read."""
    program = (
        "import contextlib, io, sys\nfrom truedraft.server.cli.main import COMMANDS, main\n"
        "for command in COMMANDS:\n    for flag in ('--help', '--help-all', '--no-such-option'):\n"
        "        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "            main([command, flag])\n"
        "        loaded = {'torch', 'transformers', 'fastapi'} & sys.modules.keys()\n"
        "        if loaded:\n            sys.exit(f'{command} {flag} loads {loaded}')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("given", ["[123]", "[[a]]", "{a: b}"])
def test_keys_of_a_wrong_type_are_named(tmp_path: Path, given: str) -> None:
    for name in ("api_keys", "cors_origins"):
        (tmp_path / "config.yaml").write_text(f"{name}: {given}")
        with pytest.raises(ConfigError, match=name):
            load_settings(["--config", str(tmp_path / "config.yaml")])


def test_a_key_file_may_have_a_byte_order_mark_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfa-key\n")
    assert keys("--api-key-file", str(path)) == ["a-key"]
    path.write_text("schlüssel\n")
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        keys("--api-key-file", str(path))


def test_a_socket_with_a_long_name(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="too long"):
        bind_unix(tmp_path / ("a" * 120))


def test_a_key_with_a_passphrase_is_refused(tmp_path: Path) -> None:
    """Nobody may be there to type it."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=x", "-passout", "pass:secret"]
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with pytest.raises(StartError, match="ssl_keyfile"):
        check_tls(Settings(ssl_certfile=certificate, ssl_keyfile=key))


@pytest.mark.parametrize("closed", ["1>&- 2>&-", "0>&-", "0>&- 1>&- 2>&-"])
def test_closed_streams_end_nothing(closed: str) -> None:
    command = f"{sys.executable} -m truedraft --version {closed}"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    command = f"rmdir {tmp_path}; {sys.executable} -P -m truedraft --version"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "truedraft: error: The current folder no longer exists. Change to another one.\n"
