"""Turns a model's name into a path on this machine, and fetches files that are missing.

``huggingface_hub`` does the fetching: its cache, its variables (``HF_ENDPOINT``, ``HF_HOME``, ``HF_TOKEN``,
``HF_HUB_OFFLINE``) and its checks hold here, too. If a fetch is killed, files that were complete stay.
"""

import logging
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.hub.folders import check_path
from truedraft.engine.hub.names import HubName, hub_name
from truedraft.engine.hub.repository import (
    Choice,
    RepoFile,
    Variant,
    choose,
    drafters,
    missing_parts,
    shown_size,
)
from truedraft.engine.hub.siblings import most_likely
from truedraft.engine.machine.limits import free_memory

CONNECT_SECONDS = 2.5  # A hub that does not answer within this time counts as unreachable.
ANSWER_SECONDS = 20.0
# A draft's file is fetched together with a model if it has at most this share of the model's bytes.
DRAFTER_SHARE = 0.25


@dataclass(frozen=True)
class Progress:
    """Says how far a model is fetched, in bytes. Bytes that were here already count from the start."""

    name: str
    done: int
    total: int


Tell = Callable[[Progress], None]


@dataclass(frozen=True)
class Found:
    """Says where a model is on this machine, and notes for a person about the choice of files."""

    path: str
    note: str = ""
    drafters: Sequence[str] = ()  # names of GGUF files in the same repository that draft for it
    fetched_drafter: str = ""  # The drafting file that was fetched, too, and its size.


def find_model(
    name: str,
    *,
    tell: Tell = lambda progress: None,
    allow_pickle: bool = False,
    with_code: bool = False,
    with_drafter: bool = False,
) -> Found:
    """Returns the path of the model ``name``, after fetching it if necessary; raises ``ModelLoadError``.

    ``with_drafter`` also fetches the most likely of the files that draft for it, if that is small.
    """
    wanted = hub_name(name)
    if wanted is None:
        check_path(name, allow_pickle=allow_pickle)
        return Found(name)
    files, folder = _files(wanted)
    choice = choose(wanted, files, free_memory(), allow_pickle=allow_pickle, with_code=with_code)
    if missing := missing_parts(choice.files):
        raise ModelLoadError(
            f"{wanted.repo} lacks {missing} of the parts of {choice.entry}"
            + ("" if folder is None else " in the local cache, and the hub cannot be reached")
        )
    first = _fetch(wanted, choice, tell) if folder is None else folder / choice.files[0].name
    names = [f"{wanted.repo}/{variant.parts[0].name}" for variant in drafters(files)]
    if choice.entry is None:
        first = first.parents[choice.files[0].name.count("/")]
    drafter = _small_drafter(wanted, choice, files) if with_drafter and folder is None else None
    if drafter is None:
        return Found(str(first), choice.note, names)
    _fetch(wanted, Choice(drafter.parts, drafter.parts[0].name), tell)
    return Found(str(first), choice.note, names, f"{drafter.parts[0].name} ({shown_size(drafter.size)})")


def _small_drafter(name: HubName, choice: Choice, files: Sequence[RepoFile]) -> Variant | None:
    """Returns the most likely drafter in the same folder of the repository, among those that are small in
    comparison with the model of the ``choice``."""
    folder = choice.files[0].name.rpartition("/")[0]
    found = {variant.parts[0].name: variant for variant in drafters(files)}
    found = {path: variant for path, variant in found.items() if path.rpartition("/")[0] == folder}
    ranked = most_likely(choice.entry or name.repo, found)
    small = [found[each] for each in ranked if found[each].size <= DRAFTER_SHARE * choice.size]
    return small[0] if small else None


def _files(name: HubName) -> tuple[list[RepoFile], Path | None]:
    """Returns the files of a repository on the hub; where the hub cannot be reached, those of the cache and
    the folder that has them."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE or not _is_reachable(constants.ENDPOINT):
        return _cached_files(name, "cannot be reached (no network, or HF_HUB_OFFLINE is set)")
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        info = HfApi(endpoint=constants.ENDPOINT).model_info(
            name.repo, revision=name.revision, files_metadata=True, timeout=ANSWER_SECONDS
        )
    except (HfHubHTTPError, HFValidationError) as error:
        raise ModelLoadError(explain_hub(name, error)) from error
    except Exception as error:  # The client's transport raises errors of its own types.
        return _cached_files(name, f"does not answer: {error or type(error).__name__}")
    return [RepoFile(each.rfilename, each.size or 0) for each in info.siblings or ()], None


def _cached_files(name: HubName, why: str) -> tuple[list[RepoFile], Path]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name.repo, revision=name.revision, local_files_only=True))
    except HFValidationError as error:
        raise ModelLoadError(explain_hub(name, error)) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"{name} is neither a path nor in the local cache of the hub, and the hub {why}"
        ) from error
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [RepoFile(path.relative_to(folder).as_posix(), path.stat().st_size) for path in found], folder


def _fetch(name: HubName, choice: Choice, tell: Tell) -> Path:
    """Returns the path of the first file once all are here; for files in the cache the hub is only asked
    whether they changed."""
    from huggingface_hub import hf_hub_download

    # Its messages about retries are no news for the user.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    _check_disk(name, choice)
    done = 0
    first: Path | None = None

    def told(before: int, here: int) -> None:
        tell(Progress(str(name), before + here, choice.size))

    for file in choice.files:
        bar = _counter(partial(told, done))
        try:
            path = hf_hub_download(name.repo, file.name, revision=name.revision, tqdm_class=bar)
        except Exception as error:  # The causes are many: the hub, the transport, the disk.
            raise ModelLoadError(explain_hub(name, error, file.name)) from error
        done += file.size
        tell(Progress(str(name), done, choice.size))
        first = first or Path(path)
    assert first is not None  # A choice has at least one file.
    return first


def _check_disk(name: HubName, choice: Choice) -> None:
    """Refuses files that do not fit on the disk of the cache, before anything is fetched."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if choice.size > free:
        raise ModelLoadError(
            f"{name} takes {shown_size(choice.size)}, but the disk of {folder} has {shown_size(free)} free. "
            "Set HF_HOME to a folder of another disk"
        )


def _counter(tell: Callable[[int], None]) -> type:
    """Returns a class that ``huggingface_hub`` may use as a progress bar; ``tell`` is called with the number
    of bytes that are here."""

    class Counter:
        def __init__(self, *args: Any, total: float | None = None, initial: float = 0, **kwargs: Any) -> None:
            self.total, self.n = total, initial
            tell(int(self.n))

        def __enter__(self) -> "Counter":
            return self

        def __exit__(self, *raised: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            tell(int(self.n))

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: None  # Closing, refreshing and describing show nothing.

    return Counter


def _is_reachable(endpoint: str) -> bool:
    """Tells whether the hub's host takes a connection; a proxy is trusted to reach it."""
    address = urlsplit(endpoint)
    if address.scheme in getproxies():
        return True
    taken = threading.Event()

    def connect() -> None:
        port = address.port or {"http": 80}.get(address.scheme, 443)
        with suppress(OSError), socket.create_connection((address.hostname, port), CONNECT_SECONDS):
            taken.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)  # A resolver that does not answer can wait longer than a connection does.
    return taken.is_set()


def explain_hub(name: HubName, error: BaseException, file: str = "") -> str:
    """Says in one sentence why the hub does not give a model, and what to do about it."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return (
            f"{name.repo} is gated: accept its terms on its page, and set HF_TOKEN to a token of that account"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision}"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no path {name}, and no model {name.repo} on the hub (a private one needs HF_TOKEN)"
    if isinstance(error, HFValidationError):
        return f"{name} is neither a path nor the name of a model on the hub, which is owner/repository"
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    what = f"{file} of {name.repo}" if file else name.repo
    return f"{what} could not be fetched: {reason}. Whole files that have come are kept"
