"""Implements ``truedraft pull``, ``list`` and ``rm``, for models of the hub's cache on this machine."""

import sys

from truedraft.engine.commands.options import ListSettings, PullSettings, RemoveSettings
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.hub.fetch import find_model
from truedraft.engine.hub.fetch_bar import fetch_bar
from truedraft.engine.hub.names import hub_name
from truedraft.engine.hub.repository import shown_size
from truedraft.engine.hub.store import Stored, remove, shown_age, stored_models
from truedraft.engine.terminal import console, table

DONE, FAILED = 0, 1


def pull(settings: PullSettings) -> int:
    try:
        if hub_name(settings.name) is None:
            raise ModelLoadError(f"{settings.name} is a path, not the name of a model on the hub")
        with fetch_bar() as tell:
            found = find_model(
                settings.name,
                tell=tell,
                allow_pickle=settings.allow_pickle,
                with_code=settings.trust_remote_code,
            )
    except ModelLoadError as error:
        return _failed("pull", error)
    if found.note:
        print(found.note, file=sys.stderr)
    for name in found.drafters:
        print(f"Drafts for it: {name}", file=sys.stderr)
    print(found.path)
    return DONE


def list_models(settings: ListSettings) -> int:
    stored = stored_models()
    if settings.paths:
        for model in stored:
            print(model.path)
        return DONE
    if not stored:
        print("The cache is empty. 'truedraft pull NAME' fetches a model.", file=sys.stderr)
        return DONE
    rows = table(["name", "type", "size", "last used", "served by"], num_left=2)
    reasons = []
    for model in stored:
        way, reason = _way(model)
        rows.add_row(model.name, model.kind, shown_size(model.size), shown_age(model.last_used), way)
        reasons += [reason] if reason else []
    console().print(rows)
    for reason in reasons:
        print(reason, file=sys.stderr)
    return DONE


def remove_model(settings: RemoveSettings) -> int:
    try:
        freed = remove(settings.name)
    except ModelLoadError as error:
        return _failed("rm", error)
    print(f"Removed {settings.name}: {shown_size(freed)}.")
    return DONE


def _way(model: Stored) -> tuple[str, str]:
    """Returns what would compute a model here, or why nothing can."""
    from truedraft.engine.models.sources import way_of

    try:
        return way_of(model.path), ""
    except ModelLoadError as error:
        return "-", f"{model.name} cannot be served: {error}".replace(model.path, model.name)


def _failed(command: str, error: ModelLoadError) -> int:
    print(f"truedraft {command}: error: {error}", file=sys.stderr)
    return FAILED
