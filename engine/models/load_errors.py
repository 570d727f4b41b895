"""Explains the failures of ``engine.models.load`` in one sentence each."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from truedraft.engine.errors import ModelLoadError, QuantizationError
from truedraft.engine.parallel.group import RankLostError

logger = logging.getLogger(__name__)

# Errors whose messages are for users.
SPOKEN = (KeyError, OSError, RuntimeError, StrictDataclassError, ValueError)


@contextmanager
def stage(path: str, what: str) -> Iterator[None]:
    """Turns every error of one stage of loading ``path`` into a ``ModelLoadError``; ``what`` names the file
    or the stage."""
    try:
        yield
    except (ModelLoadError, RankLostError):
        raise
    except Exception as error:  # Formats, quantisers and hubs fail in many ways; the user needs one line.
        logger.debug("%s: %s", path, what, exc_info=True)
        raise ModelLoadError(explain(path, error, what)) from error


def explain(path: str, error: BaseException, what: str = "") -> str:
    """Says why loading ``path`` failed, in one line that says what to do about it; ``what`` names the file or
    the stage."""
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
    """Explains errors whose type says the cause."""
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
    """Returns the first sentences of a message that may go on for a page."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]} ..."
