"""What can be wrong with a checkpoint, in one sentence each: folders before loading, errors after.

``engine.models.load`` loads; this module only looks and explains.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from transformers.utils import cached_file

from truedraft.engine.errors import ModelLoadError, QuantizationError
from truedraft.engine.formats.gguf_file import is_gguf

logger = logging.getLogger(__name__)

WEIGHTS = ("*.safetensors", "*.bin")
# Errors whose messages are for users.
SPOKEN = (KeyError, OSError, RuntimeError, StrictDataclassError, ValueError)
# Files that git-lfs leaves as pointers where it has not downloaded them, and how a pointer begins.
LARGE_FILES, POINTER = (*WEIGHTS, "*.json", "*.model"), b"version https://git-lfs.github.com/spec/"


@contextmanager
def stage(path: str, what: str) -> Iterator[None]:
    """Makes every error of one stage of loading ``path`` a ``ModelLoadError``; ``what`` names the file or the
    stage."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:  # formats, quantisers and hubs fail in many ways; the user needs one line
        logger.debug("%s: %s", path, what, exc_info=True)
        raise ModelLoadError(explain(path, error, what)) from error


def check_folder(path: str, *, allow_pickle: bool = False) -> None:
    """``ModelLoadError`` if ``path`` is meant to be a folder, but no model can be loaded from it."""
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or folder.exists()
    if not looks_local:
        return
    if not folder.is_dir():
        raise ModelLoadError(f"{path} is not a model folder: there is no such folder")
    _check_pointers(folder)
    _check_files(path, folder, allow_pickle)


def _check_files(path: str, folder: Path, allow_pickle: bool) -> None:
    weights = [name for pattern in WEIGHTS for name in folder.glob(pattern) if "adapter" not in name.name]
    if (folder / "adapter_config.json").is_file() and not weights:
        raise ModelLoadError(
            f"{path} is a LoRA adapter of {_base_model(folder)}, not a whole model: merge it "
            "(merge_and_unload, then save_pretrained) and give the merged folder"
        )
    if not (folder / "config.json").is_file():
        kind = "only GGUF files" if any(is_gguf(file.name) for file in folder.iterdir()) else "no config.json"
        raise ModelLoadError(f"{path} is not a model folder: it has {kind}")
    if not weights:
        raise ModelLoadError(f"{path} has a config.json, but no weights (*.safetensors)")
    if not allow_pickle and not any(name.suffix == ".safetensors" for name in weights):
        raise ModelLoadError(
            f"{path} has its weights only as a pickle ({weights[0].name}): convert them to safetensors, or "
            "set allow_pickle if you trust their source"
        )


def has_file(path: str, name: str) -> bool:
    """Tells whether the folder or repository ``path`` has the file ``name``, as far as can be seen."""
    found = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return found is not None


def _check_pointers(folder: Path) -> None:
    for file in sorted(file for pattern in LARGE_FILES for file in folder.glob(pattern) if file.is_file()):
        with file.open("rb") as opened:
            if opened.read(len(POINTER)) == POINTER:
                raise ModelLoadError(
                    f"{file} is a git-lfs pointer, not the file itself: run 'git lfs pull' in its folder"
                )


def _base_model(folder: Path) -> str:
    try:
        return str(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])
    except (OSError, ValueError, KeyError):
        return "another model"


def explain(path: str, error: BaseException, what: str = "") -> str:
    """Says what went wrong while ``path`` was loaded, in one line that says what to do about it; ``what``
    names the file or the stage."""
    for cause in _causes(error):
        if (words := _explain_cause(path, cause)) is not None:
            return words
    text = str(error)
    if isinstance(error, StrictDataclassError):
        text = text.rpartition("Error: ")[2]
    if isinstance(error, KeyError):
        text = f"{text} is missing or not known"
    if "trust_remote_code" in text:
        return (
            f"{path} brings its own code, which is not run unless you ask for it: read it, "
            "then set trust_remote_code"
        )
    if isinstance(error, ImportError):
        return f"{path} needs a package that is not installed: {_one_line(text.partition('. ')[0])}"
    place = f"{path} ({what})" if what else path
    # Messages of other errors mean little without the error's name.
    name = "" if text and isinstance(error, SPOKEN) else type(error).__name__
    return f"cannot load {place}: {': '.join(part for part in (name, _one_line(text)) if part)}"


def _explain_cause(path: str, cause: BaseException) -> str | None:
    """Explains errors whose type says what went wrong."""
    if isinstance(cause, GatedRepoError):
        return f"{path} is gated: accept its terms on its page, and set HF_TOKEN to a token of that account"
    if isinstance(cause, RepositoryNotFoundError):
        return (
            f"there is no folder {path}, and no such model on the hub "
            "(a private one needs HF_TOKEN to be set)"
        )
    if isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return (
            f"{path} is neither a folder nor in the local cache of the hub, and the hub cannot be "
            "reached (no network, or HF_HUB_OFFLINE is set)"
        )
    if isinstance(cause, HFValidationError):
        return f"{path} is neither a folder nor the id of a model on the hub"
    if isinstance(cause, SafetensorError):
        return f"the weights in {path} are damaged or cut off: {cause}"
    if isinstance(cause, QuantizationError):
        return f"{path} cannot be served on a CPU: {cause}"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = 0
    while error is not None and seen < 20:
        yield error
        error, seen = error.__cause__ or error.__context__, seen + 1


def _one_line(text: str) -> str:
    """The first sentences of a message that may go on for a page."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]} ..."
