"""Reads names of models as people write them: paths, and the hub's ids, files and addresses."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from truedraft.engine.formats.gguf_file import is_gguf

HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
# An address has one of these parts between the repository and the revision.
VIEWS = ("tree", "blob", "resolve", "raw")
WORD = r"[A-Za-z0-9][\w.-]*"
NAME = re.compile(rf"(?P<repo>{WORD}(?:/{WORD})?)(?:@(?P<revision>[\w./-]+))?(?::(?P<quant>[\w.-]+))?")
FILE = re.compile(rf"(?P<repo>{WORD}/{WORD})(?:@(?P<revision>[\w.-]+))?/(?P<file>.+\.gguf)", re.IGNORECASE)


@dataclass(frozen=True)
class HubName:
    """Names a repository of the hub, and the files of it that are wanted."""

    repo: str  # owner/name; a few old repositories have no owner
    revision: str | None = None  # branch, tag or commit; None: the main branch
    file: str | None = None  # path of a GGUF file inside the repository
    quant: str | None = None  # such as Q4_K_M; any case

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        file = "" if self.file is None else f"/{self.file}"
        return f"{self.repo}{revision}{file}" + ("" if self.quant is None else f":{self.quant}")


def hub_name(name: str) -> HubName | None:
    """Reads a name of the hub; None for a path of this machine, which may not exist.

    A path that exists is never taken for a name of the hub. ``./`` , ``../``, ``/`` and ``~`` begin paths.
    """
    if name.startswith((".", "/", "~")) or Path(name).expanduser().exists():
        return None
    rest, is_address = _without_host(name)
    if is_address and (found := _of_address(rest)) is not None:
        return found
    if match := FILE.fullmatch(rest):
        return HubName(match["repo"], match["revision"], match["file"])
    match = NAME.fullmatch(rest)
    if match is None or is_gguf(match["repo"]):
        return None
    return HubName(match["repo"], match["revision"], quant=match["quant"])


def _without_host(name: str) -> tuple[str, bool]:
    """Returns a name without scheme, host and query, and tells whether it had a host."""
    scheme, has_scheme, rest = name.partition("://")
    rest = rest if has_scheme else scheme
    hosts = (*HOSTS, re.sub(r"^https?://", "", os.environ.get("HF_ENDPOINT", "")).rstrip("/"))
    for host in filter(None, hosts):
        if rest.lower().startswith(f"{host.lower()}/"):
            return rest[len(host) + 1 :].partition("?")[0].partition("#")[0].strip("/"), True
    return name, False


def _of_address(path: str) -> HubName | None:
    """Reads the path of a page or file of the hub, such as ``owner/name/blob/main/model.gguf``."""
    owner, name, view, revision, *file = [*map(unquote, path.split("/")), *[""] * 4]
    if view not in VIEWS or not revision:
        return None
    inside = "/".join(part for part in file if part)
    return HubName(f"{owner}/{name}", revision, inside if is_gguf(inside) else None)
