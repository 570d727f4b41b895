"""Resolves references in a JSON schema: pointers into the schema, and parts with a name of their own.

Nothing is fetched. The module knows nothing of the meaning of schemas.
"""

from typing import Any
from urllib.parse import unquote, urljoin

from truedraft.engine.text.schema.demands import Placed
from truedraft.engine.text.schema.one_of import VALUES
from truedraft.engine.text.schema.place import Place


class Resources:
    """Holds the parts of ``root``, which are looked for when the first reference is followed."""

    def __init__(self, root: Any, place: Place) -> None:
        self._root = Placed(root, place)
        self._by_name: dict[str, Placed] = {}
        self._bases: dict[int, str] = {}

    def find(self, reference: str, schema: dict[str, Any]) -> Placed | None:
        """Returns the part to which ``reference`` in ``schema`` refers; None if that does not exist."""
        if not self._by_name:
            self._look_for_names()
        name = _joined(self._bases.get(id(schema), ""), reference)
        whole, _, pointer = name.partition("#")
        if pointer and not pointer.startswith("/"):
            return self._by_name.get(name)
        found = self._by_name.get(whole)
        for part in pointer.split("/")[1:]:
            found = found and _child(found, unquote(part).replace("~1", "/").replace("~0", "~"))
        return found

    def _look_for_names(self) -> None:
        self._by_name[""] = self._root
        pending = [(self._root, "")]
        while pending:
            (schema, place), base = pending.pop()
            if isinstance(schema, list):
                pending += ((Placed(each, place.at(number)), base) for number, each in enumerate(schema))
            if not isinstance(schema, dict):
                continue
            own = schema.get("$id")
            if isinstance(own, str):
                name = _joined(base, own).removesuffix("#")
                base = base if "#" in name else name
                self._by_name[name] = Placed(schema, place)
            anchor = schema.get("$anchor")
            if isinstance(anchor, str):
                self._by_name[f"{base}#{anchor}"] = Placed(schema, place)
            self._bases[id(schema)] = base
            pending += (
                (Placed(each, place.at(name)), base) for name, each in schema.items() if name not in VALUES
            )


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _child(placed: Placed, name: str) -> Placed | None:
    schema, place = placed
    if isinstance(schema, list) and name.isdecimal() and len(name) < 10 and int(name) < len(schema):
        return Placed(schema[int(name)], place.at(name))
    if isinstance(schema, dict) and name in schema:
        return Placed(schema[name], place.at(name))
    return None
