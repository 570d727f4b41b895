"""Where settings come from, which one wins, and how mistakes are reported."""

import json
import os
from pathlib import Path

import pytest

from tools.write_configuration import library_settings
from truedraft.engine.config import EngineConfig
from truedraft.engine.errors import ConfigError
from truedraft.engine.hub.folders import context_of
from truedraft.server.cli import launch
from truedraft.server.cli.help import configuration_page, setting_groups
from truedraft.server.cli.main import main
from truedraft.server.cli.settings_sources import load_settings
from truedraft.server.settings import Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("port: 1001\nmax_num_sequences: 1001\nnum_speculative_tokens: 3\napi_keys: [a, b]\n")
    return path


def test_flags_before_environment_before_yaml_before_defaults(
    yaml_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEDRAFT_PORT", "1002")
    monkeypatch.setenv("TRUEDRAFT_MAX_NUM_SEQUENCES", "1002")
    settings = load_settings(["--config", str(yaml_file), "--port", "1003"])
    assert settings.port == 1003
    assert settings.max_num_sequences == 1002
    assert settings.num_speculative_tokens == 3
    assert settings.host == "127.0.0.1"


def test_config_file_from_the_environment(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEDRAFT_CONFIG", str(yaml_file))
    assert load_settings([]).port == 1001
    assert load_settings([f"--config={yaml_file}"]).port == 1001


def test_lists_and_sizes(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--cors-origins", "http://a, http://b", "--cache-memory", "2GiB", "--strict-fields"]
    settings = load_settings(["--config", str(yaml_file), *flags])
    assert settings.cors_origins == ["http://a", "http://b"]
    assert settings.cache_memory == 2 << 30
    assert settings.strict_fields
    assert [key.get_secret_value() for key in settings.api_keys] == ["a", "b"]
    monkeypatch.setenv("TRUEDRAFT_API_KEYS", "c,d")
    assert [key.get_secret_value() for key in load_settings([]).api_keys] == ["c", "d"]
    assert "c" not in repr(load_settings([]).api_keys).replace("Secret", "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prot", "1"], "Unknown flag --prot. Did you mean --port?"),
        (["--num_speculative_tokens", "1"], "Did you mean --num-speculative-tokens?"),
        (["--no-strict-field"], "Did you mean --no-strict-fields?"),
        (["--port", "many"], "port: must be a whole number"),
        (
            ["--num-speculative-tokens", "33"],
            "num_speculative_tokens: must be less than",
        ),
        (
            ["--dtype", "int3"],
            "or 'float16', not 'int3'.",
        ),
        (["--config"], "--config needs the path of a YAML file."),
        (["--config", "/no/such/file"], "Cannot read the configuration file /no/such/file"),
        (
            ["--kv-events-endpoint", "tcp://*:5557", "--workers", "2"],
            "kv_events_endpoint tells of one worker's cache, and workers is 2; start several servers",
        ),
        (
            ["--kv-events-endpoint", "tcp://*:5557", "--api-keys", "one-key,another-key"],
            "kv_events_endpoint tells of no text that belongs to one of several keys alone; set",
        ),
        (
            ["--kv-events-endpoint", "tcp://*:5557", "--no-prefix-caching"],
            "kv_events_endpoint tells of what prefix_caching keeps",
        ),
        (["--port", "1", "stray"], "stray"),
        (["--port"], "port"),
    ],
)
def test_mistakes_in_flags(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["TRUEDRAFT_PROT", "TRUEDRAFT_MAX_NUM_SEQUENCE", "truedraft_api_key"])
def test_mistakes_in_the_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"Unknown variable {name}. Did you mean TRUEDRAFT_"):
        load_settings([])


@pytest.mark.parametrize("name", ["TRUEDRAFT_SERVICE_HOST", "TRUEDRAFT_PORT_8000_TCP_ADDR", "TRUEDRAFTS"])
def test_variables_of_others(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "10.0.0.1")
    load_settings([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("portt: 1", "Unknown key portt. Did you mean port?"),
        ("zzzzzz: 1", "Unknown key zzzzzz. (in"),
        ("num_speculative_tokens: many", "num_speculative_tokens: must be a whole number"),
        ("just words", "must hold 'key: value' lines"),
        ("port: [", "is not valid YAML"),
    ],
)
def test_mistakes_in_yaml(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(["--config", str(path)])
    assert message in str(caught.value)


def test_engine_gets_its_own_settings_only() -> None:
    settings = load_settings(["--target", "org/model", "--block-size", "32", "--port", "1"])
    config = settings.engine_config()
    assert type(config) is EngineConfig
    assert (config.target, config.draft, config.block_size) == ("org/model", "auto", 32)
    assert EngineConfig.model_validate(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "truedraft-demo"),
        (["--target", "org/model"], "org/model"),
        (["--target", str(ROOT)], ROOT.name),
        (["--target", "org/model", "--served-model-name", "mine"], "mine"),
    ],
)
def test_served_model_name(flags: list[str], name: str) -> None:
    assert load_settings(flags).served_model_name == name


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_load(path: Path) -> None:
    load_settings(["--config", str(path)])


@pytest.mark.parametrize("flags", [["-tp", "2"], ["-tp=2"], ["--tensor-parallel-size", "2"]])
def test_ranks_have_a_short_flag(flags: list[str]) -> None:
    assert load_settings(flags).tensor_parallel_size == 2


def test_default_file_has_every_setting_with_its_default() -> None:
    settings = load_settings(["--config", str(ROOT / "configs" / "default.yaml")])
    assert settings.model_dump(exclude={"config"}) == load_settings([]).model_dump(exclude={"config"})
    text = (ROOT / "configs" / "default.yaml").read_text()
    for name in set(Settings.model_fields) - {"config"}:
        assert f"{name}:" in text


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    versions = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert versions == ["truedraft", "python", "torch", "device", "kernels"]
    assert main([]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["serve", "--help-all"]) == 0
    shown = capsys.readouterr().out
    for name, field in Settings.model_fields.items():
        dash = "--[no-]" if field.annotation is bool else "--"
        assert shown.count(f"  {dash}{name.replace('_', '-')} ") == 1
    assert max(map(len, shown.splitlines())) <= 110


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}])
def test_commands_that_load_torch_do_not_let_its_threads_spin(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    assert main([]) == 0
    assert os.environ == (given or {"GOMP_SPINCOUNT": "1000"})


def test_configuration_page_is_up_to_date() -> None:
    """If not: python -m tools.write_configuration"""
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == configuration_page()


def test_the_types_of_the_librarys_settings_are_up_to_date() -> None:
    """If not: python -m tools.write_configuration"""
    assert (ROOT / "engine" / "library" / "settings.py").read_text(encoding="utf-8") == library_settings()


def test_every_setting_is_in_one_group_and_described() -> None:
    names = [name for _, fields in setting_groups() for name in fields]
    assert sorted(names) == sorted(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["server"], 2, "Unknown command server."),
        (["serve", "--prot", "1"], 2, "Did you mean --port?"),
        (
            ["serve", "--target", "/no/such/model"],
            1,
            "There is no file or folder /no/such/model.",
        ),
    ],
)
def test_mistakes_on_the_command_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main(arguments) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-len", "1000000"], "max_model_len is 1000000, the target's context only 1024."),
        (["--draft", "nowhere.gguf"], "There is no file nowhere.gguf."),
        (
            ["nowhere/nor/here"],
            "There is no file or folder nowhere/nor/here; a model of the hub is owner/repository, ",
        ),
        (["--device", "cuda"], "device is 'cuda', but the installed torch"),
    ],
)
def test_cheap_mistakes_are_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(launch, "version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(launch, "make_app", None)  # nothing is begun
    assert main(["serve", *arguments, "--port", "0"]) == 1
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert message in output.err


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 2048}}, 2048),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn"}}, None),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default"}}, 4096),
        ({"max_position_embeddings": 512, "is_encoder_decoder": True}, None),
        ({"max_position_embeddings": "many"}, None),
        ({}, None),
        ([], None),
    ],
)
def test_context_that_a_config_names(tmp_path: Path, config: object, context: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_of(str(tmp_path)) == context
