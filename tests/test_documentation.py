"""What the pages say exists: files behind links, metrics in queries, settings in tables."""

import re
from pathlib import Path

import pytest

from truedraft.server.metrics import Metrics
from truedraft.server.settings import Settings

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the page's headings."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


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
    rows = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8").splitlines()
    ours = [
        flag
        for row in rows
        if row.startswith("| `")
        for flag in re.findall(r"`--([\w-]+)", row.split("|")[1])
    ]
    known = {name.replace("_", "-") for name in Settings.model_fields} | {"api-key"}
    assert len(ours) > 20
    assert {flag.removeprefix("no-") for flag in ours} <= known
