"""Entries of settings that have a form of their own: the models of a server, and the rights of its keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from truedraft.engine.config import EngineConfig

BUNDLED_MODEL_NAME = "truedraft-demo"
# Words after a key of ``api_key_file`` say what the key may do, and which models it may use.
OPERATE, MODELS = "operate", "models="


class ModelEntry(EngineConfig):
    """Describes one model of several. Settings of the engine that it leaves out are those of the server."""

    name: str = Field("", description="Names that requests use in 'model', comma-separated.")
    load: Literal["always", "on_demand"] = Field(
        "on_demand", description="always: load the model at start, and unload it only if asked to."
    )
    chat_template: Path | None = Field(None, description="Jinja chat template of this model.")
    workers: int | None = Field(None, ge=1, description="Worker processes of this model.")

    def own_settings(self) -> dict[str, Any]:
        """Returns what the entry says, without what it leaves open."""
        return {
            name: getattr(self, name)
            for name in self.model_fields_set | {"target", "draft"}
            if name not in ("name", "load")
        }


def model_entries(value: object) -> object:
    """Lets an entry be a model's name or path alone, and several of these be comma-separated."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list):
        return value
    return [
        entry
        for part in parts
        for entry in (map(_entry, part.split(",")) if isinstance(part, str) else [part])
    ]


def _entry(name: str) -> dict[str, str]:
    """Takes the name of the bundled pair for that pair, which is nothing else's name."""
    return {} if name.strip() == BUNDLED_MODEL_NAME else {"target": name.strip()}


@dataclass(frozen=True, slots=True)
class Rights:
    """Says what a request may do. ``models`` None is all of them."""

    models: frozenset[str] | None = None
    may_operate: bool = True


# A key without words after it, and a server without keys.
RIGHTS_OF_A_KEY, ALL_RIGHTS = Rights(may_operate=False), Rights()


def read_rights(words: Sequence[str]) -> Rights:
    """Reads the words after a key; ``ValueError`` for one that is not known."""
    models: frozenset[str] | None = None
    for word in words:
        if word.startswith(MODELS):
            models = frozenset(filter(None, word.removeprefix(MODELS).split(",")))
            if not models:
                raise ValueError(f"{word!r} after a key names no model")
        elif word != OPERATE:
            raise ValueError(f"{word!r} after a key is neither {OPERATE!r} nor '{MODELS}NAME,NAME'")
    return Rights(models, OPERATE in words)
