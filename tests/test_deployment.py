"""deploy/, the image and the compose file agree with the server; schemas are checked by make check-deploy."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from truedraft.server.cli.settings_sources import load_settings
from truedraft.server.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


def needs(tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")


@pytest.mark.parametrize(
    "path", ["Dockerfile", "docker-compose.yml", "docs/deployment.md", "docs/security.md"]
)
def test_variables_are_settings(path: str) -> None:
    variables = re.findall(rf"\b{ENV_PREFIX}(\w+)", (ROOT / path).read_text(encoding="utf-8"))
    assert {name.lower() for name in variables} <= set(Settings.model_fields)


def test_the_chart_has_the_version_and_settings_that_load(tmp_path: Path) -> None:
    chart = yaml.safe_load((DEPLOY / "helm" / "truedraft" / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    values = yaml.safe_load((DEPLOY / "helm" / "truedraft" / "values.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values["config"]))
    assert load_settings(["--config", str(tmp_path / "config.yaml")]).host == "0.0.0.0"


def test_nothing_is_killed_before_it_has_drained() -> None:
    drain = Settings.model_fields["drain_timeout"].default
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    grace = compose["services"]["cpu"]["stop_grace_period"]
    unit = (DEPLOY / "systemd" / "truedraft.service").read_text()
    assert int(grace.removesuffix("s")) > drain
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) > drain
    assert "KillMode=mixed" in unit


def test_the_image_gets_every_package() -> None:
    linked = {path.resolve().relative_to(ROOT).as_posix() for path in (ROOT / "truedraft").iterdir()}
    packages = {"truedraft"} | {name for name in linked if "/" not in name}
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    assert packages == {"truedraft", "engine", "server", "loadtest"}
    assert {f"!{name}" for name in packages} <= set(kept)


def test_workflows_call_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(" ".join(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)).split())
    workflows = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    steps = [step for flow in workflows for part in flow["jobs"].values() for step in part["steps"]]
    commands = [step["run"].removeprefix("sudo ") for step in steps if "run" in step]
    calls = [command.removeprefix("make ") for command in commands if not command.startswith("apt-get ")]
    words = {word for call in calls for word in call.split()}
    called = {word for word in words if "=" not in word}
    assert {"check", "test", "check-docker", "test-ray"} <= called <= targets
    variables = set(re.findall(r"^(\w+) \?=", makefile, re.MULTILINE))
    assert {word.partition("=")[0] for word in words - called} <= variables


@pytest.mark.parametrize(
    ("heading", "tag", "is_right"),
    [
        ("## [1.2.3] - 2026-01-01", "v1.2.3", True),
        ("## [1.2.3] - Unreleased", "v1.2.3", False),
        ("## [1.2.2] - 2026-01-01", "v1.2.3", False),
        ("## [1.2.3] - 2026-01-01", "1.2.3", False),
        ("## [1.2.3] - 2026-01-01", "v1.2.4", False),
    ],
)
def test_what_is_tagged_has_a_version_and_notes(
    tmp_path: Path, heading: str, tag: str, is_right: bool
) -> None:
    needs("make")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    command = ["make", "-f", str(ROOT / "Makefile"), "check-tag", f"TAG={tag}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60)
    assert (done.returncode == 0) == is_right, done.stderr


def test_the_unit_is_valid(tmp_path: Path) -> None:
    needs("systemd-analyze")
    text = (DEPLOY / "systemd" / "truedraft.service").read_text()
    unit = tmp_path / "truedraft.service"
    unit.write_text(text.replace("/opt/truedraft/bin/truedraft", "/bin/true"))
    result = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_nginx_site_is_valid(tmp_path: Path) -> None:
    needs("nginx")
    site = DEPLOY / "nginx" / "truedraft.conf"
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{ access_log off; include {site}; }}\n"
    )
    result = subprocess.run(
        ["nginx", "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
