"""What the pages say exists: files behind links, metrics in queries, settings in tables."""

import re
from pathlib import Path

import pytest

from tools.draw_house import PICTURE, direct, drawn, floors_of, imports, placed
from tools.write_configuration import BEGIN, with_table
from truedraft.engine.errors import ConfigError
from truedraft.server.cli.foreign_flags import NONE, USE, hint
from truedraft.server.cli.settings_sources import load_settings
from truedraft.server.observability.metrics import Metrics
from truedraft.server.settings import Settings

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the page's headings."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page} links to {link}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    folders = "benchmarks|configs|deploy|engine|loadtest|server|tests|tools"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", (ROOT / page).read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_picture_of_the_house_is_up_to_date() -> None:
    """If not: python -m tools.draw_house"""
    assert PICTURE.read_text(encoding="utf-8") == drawn()


def test_each_room_stands_above_those_that_it_imports() -> None:
    graph = imports()
    floors = floors_of(graph)
    boxes, _ = placed(floors)
    assert ("server", "routes") in boxes
    lines = direct(graph)
    assert (("server", "cli"), ("server", "app")) in lines
    assert (("server", "cli"), ("server", "errors")) not in lines  # it reaches that through others
    for room, other in lines:
        assert boxes[room].y < boxes[other].y


def test_queries_use_metrics_that_exist() -> None:
    families = Metrics().exposed.collect()
    names = {
        sample
        for family in families
        for sample in (family.name, f"{family.name}_total", f"{family.name}_bucket")
    }
    queried = set(re.findall(r"truedraft_\w+", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    assert len(queried) > 15
    assert queried <= names


def test_flags_for_newcomers_exist() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    rows = page.partition(BEGIN)[0].splitlines()
    ours = [
        flag
        for row in rows
        if row.startswith("| `")
        for flag in re.findall(r"`--([\w-]+)", row.split("|")[1])
    ]
    known = {name.replace("_", "-") for name in Settings.model_fields} | {"api-key"}
    assert len(ours) > 20
    assert {flag.removeprefix("no-") for flag in ours} <= known


def test_flags_of_other_servers_get_the_hint_of_the_table() -> None:
    """Every flag in the columns of vLLM and llama.cpp is ours, too, or names what the first column has."""
    rows = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8").partition(BEGIN)[0]
    known = {f"--{name.replace('_', '-')}" for name in Settings.model_fields} | {"--api-key"}
    alternatives: dict[str, str] = {}
    for row in rows.splitlines():
        if row.startswith("| `"):
            ours, *theirs = row.strip("|").split("|")
            for flag in {flag for column in theirs for flag in re.findall(r"`(--?[a-z][\w-]*)", column)}:
                alternatives[flag] = alternatives.get(flag, "") + ours
    assert len(alternatives.keys() - known) > 15
    for flag in alternatives.keys() - known:
        named = re.findall(r"--(?:no-)?([a-z-]+)", hint(flag))
        assert hint(flag), f"{flag} has no hint"
        assert not named or any(name in alternatives[flag] for name in named), f"{flag}: {hint(flag)}"


def test_the_table_of_flags_is_that_of_the_module() -> None:
    """If not: python -m tools.write_configuration"""
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    assert with_table(page) == page
    assert all(f"`{flag}`" in page for flag in (*USE, *NONE))


def test_hints_name_flags_that_exist() -> None:
    known = {name.replace("_", "-") for name in Settings.model_fields}
    for flag, said in NONE.items():
        assert {name.removeprefix("no-") for name in re.findall(r"--([a-z-]+)", said)} <= known, flag
    for flag, use in USE.items():
        named = {name.removeprefix("no-") for name in re.findall(r"--([a-z-]+)", use)}
        assert named <= known, f"{flag}: {use}"
        with pytest.raises(ConfigError, match=re.escape(f"Unknown flag {flag}. Use {use}.")):
            load_settings([flag, "1"])
