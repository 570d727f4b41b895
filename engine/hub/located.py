"""Replaces names of models in settings by paths on this machine."""

from collections.abc import Callable
from typing import TypeVar

from truedraft.engine.config import AUTO, EngineConfig
from truedraft.engine.hub.fetch import DRAFTER_SHARE, Found, Progress, Tell, find_model
from truedraft.engine.hub.names import hub_name
from truedraft.engine.hub.repository import shown_size
from truedraft.engine.messages import HEADS

C = TypeVar("C", bound=EngineConfig)


def located(
    config: C,
    tell: Tell = lambda progress: None,
    say: Callable[[str], None] = lambda note: None,
) -> C:
    """Returns the settings with paths instead of the hub's names, after fetching what is missing.

    ``tell`` is called with the progress of a fetch, ``say`` with notes for a person about the choice of
    files. Raises ``ModelLoadError``.
    """
    assert config.target is not None  # EngineConfig filled it in.
    drafts = config.num_speculative_tokens != 0 and config.method not in ("ngram", "none")
    target = _find(config.target, config, tell, say, with_drafter=drafts and config.draft == AUTO)
    changes = {"target": target.path}
    if (draft := config.draft) is not None and is_a_model(draft):
        changes["draft"] = draft if hub_name(draft) is None else _find(draft, config, tell, say).path
    if all(getattr(config, name) == path for name, path in changes.items()):
        return config
    return config.model_copy(update=changes)


def is_a_model(draft: str) -> bool:
    """Tells whether the setting draft names a model or head by itself, and not a way to use the target."""
    return draft not in (AUTO, *HEADS) and not draft.startswith("self:")


def stage_of(progress: Progress) -> str:
    """Returns the name of the loading stage while a model is fetched."""
    return f"{progress.name}: {shown_size(progress.done)} of {shown_size(progress.total)}"


def _find(
    name: str, config: EngineConfig, tell: Tell, say: Callable[[str], None], *, with_drafter: bool = False
) -> Found:
    found = find_model(
        name,
        tell=tell,
        allow_pickle=config.allow_pickle,
        with_code=config.trust_remote_code,
        with_drafter=with_drafter,
    )
    if found.note:
        say(f"{name}: {found.note}")
    if found.fetched_drafter:
        say(
            f"{name}: {found.fetched_drafter} is fetched, too, as it may draft and has at most "
            f"{DRAFTER_SHARE:.0%} of the model's size. --draft none leaves it out"
        )
    fetched = found.fetched_drafter.partition(" ")[0]
    others = [each for each in found.drafters if each.rpartition("/")[2] != fetched]
    if others:
        say(f"{name} has files that draft for it: {', '.join(others)}. Use one with --draft NAME")
    return found
