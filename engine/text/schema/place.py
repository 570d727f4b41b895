"""Says where something stands in a request: a path costs nothing until it is read, and is short then."""

MAX_LENGTH = 1000
MAX_NAME = 100


class Place:
    """Is a path of names. Only its text has a limit: a long name is cut, and so is a long path."""

    __slots__ = ("_name", "_parent")

    def __init__(self, name: object, parent: "Place | None" = None) -> None:
        self._name = name
        self._parent = parent

    def at(self, name: object) -> "Place":
        return Place(name, self)

    def __str__(self) -> str:
        names, place = list[str](), self
        while True:
            names.append(shortened(str(place._name), MAX_NAME if place._parent else MAX_LENGTH))
            if place._parent is None:
                return shortened(".".join(reversed(names)), MAX_LENGTH)
            place = place._parent


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
