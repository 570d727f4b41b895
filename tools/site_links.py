"""A hook of mkdocs: links from docs/ to other files of the repository become text, as the site lacks them.

Links that lead nowhere stay as they are, and ``mkdocs build --strict`` fails on them.
"""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = Path(page.file.abs_src_path).parent

    def without_link(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).exists() else link[0]

    return LINK.sub(without_link, markdown)
