"""Reads names of models as people write them: paths, and the hub's ids, files and addresses."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote

from truedraft.engine.formats.gguf_file import is_gguf

PATH_BEGINS = (".", "/", "~")
HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
SCHEMES = ("hf", "huggingface")  # A name may begin with one of these, as in hf://owner/name.
WORD = r"[A-Za-z0-9][\w.-]*"
QUANT = r"(?::(?P<quant>[\w.-]+))?"
NAME = re.compile(rf"(?P<repo>{WORD}(?:/{WORD})?)(?:@(?P<revision>[\w./-]+))?{QUANT}")
FILE = re.compile(
    rf"(?P<repo>{WORD}/{WORD})(?:@(?P<revision>refs/\w+/[\w.-]+|[\w.-]+))?/(?P<file>.+\.gguf)", re.IGNORECASE
)
# This is the path of a page or file, such as owner/name/blob/main/model.gguf.
ADDRESS = re.compile(
    rf"(?P<repo>{WORD}(?:/{WORD})?)"
    r"(?:/(?P<view>tree|blob|resolve|raw|commits?)/(?P<revision>refs/\w+/[^/:]+|[^/:]+)(?:/(?P<inside>[^:]+))?)?"
    rf"{QUANT}"
)
FORMS = "owner/repository, after which @REVISION, :QUANT or /FILE.gguf may stand"


@dataclass(frozen=True)
class HubName:
    """Names a repository of the hub, and the files of it that are wanted."""

    repo: str  # owner/name; a few old repositories have no owner
    revision: str | None = None  # branch, tag or commit; None: the main branch
    file: str | None = None  # path of a GGUF file inside the repository
    quant: str | None = None  # such as Q4_K_M, or the name of a GGUF file; any case
    folder: str | None = None  # true if only the files of this repository are meant

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        inside = "".join(f"/{part}" for part in (self.folder, self.file) if part is not None)
        return f"{self.repo}{revision}{inside}" + ("" if self.quant is None else f":{self.quant}")


def hub_name(name: str) -> HubName | None:
    """Reads a name of the hub; None for a path of this machine, which may not exist.

    A path that exists is never taken for a name of the hub. ``./`` , ``../``, ``/`` and ``~`` begin paths.
    """
    if name.startswith(PATH_BEGINS) or Path(name).expanduser().exists():
        return None
    rest, query = _without_host(name)
    if query is not None and (found := _of_address(rest, query)) is not None:
        return found
    if match := FILE.fullmatch(rest):
        return HubName(match["repo"], match["revision"], match["file"])
    match = NAME.fullmatch(rest)
    if match is None or is_gguf(match["repo"]):
        return None
    return HubName(match["repo"], match["revision"], quant=match["quant"])


def _without_host(name: str) -> tuple[str, str | None]:
    """Returns a name without scheme and host, and the query of an address; None for it where the name has
    neither a host nor a scheme of the hub."""
    scheme, has_scheme, rest = name.partition("://")
    rest, _, query = (rest if has_scheme else name).partition("#")[0].partition("?")
    if has_scheme and scheme.lower() in SCHEMES:
        return rest.strip("/"), query
    hosts = (*HOSTS, re.sub(r"^https?://", "", os.environ.get("HF_ENDPOINT", "")).rstrip("/"))
    for host in filter(None, hosts):
        if rest.lower().startswith(f"{host.lower()}/"):
            return rest[len(host) + 1 :].strip("/"), query
    return name.rstrip("/"), None


def _of_address(path: str, query: str) -> HubName | None:
    """Reads an address that names a revision or shows a file. A file of another kind than GGUF stands for the
    folder that it is in."""
    match = ADDRESS.fullmatch(path)
    if match is None:
        return None
    revision = unquote(match["revision"] or "") or None
    inside = unquote(match["inside"] or "")
    shown = parse_qs(query).get("show_file_info", [""])[0]
    file = next(filter(is_gguf, (shown, inside)), None)
    if file is None and revision is None:
        return None
    if file is not None and match["quant"] is None:
        return HubName(match["repo"], revision, file)
    folder = inside if match["view"] == "tree" else inside.rpartition("/")[0]
    return (
        None if file is not None else HubName(match["repo"], revision, None, match["quant"], folder or None)
    )
