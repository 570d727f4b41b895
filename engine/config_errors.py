"""Turns pydantic's reports of wrong settings into one plain line for each setting."""

import difflib
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

SECRET = ("api_keys",)  # No message repeats the value of these settings.


def describe(error: ValidationError) -> str:
    """Returns one line for each wrong setting.

    Where a setting may have one of several types, pydantic reports an error for each of them, and the line
    names them all.
    """
    by_setting: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for detail in error.errors():
        place = detail["loc"]
        by_setting.setdefault(place[:3] if len(place) > 2 and place[0] == "models" else place[:1], []).append(
            detail
        )
    return "\n".join(map(_describe, by_setting.values()))


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the name that was probably meant, or an empty
    text."""
    names = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return f" Did you mean {names[0]}?" if names else ""


def _describe(errors: list[ErrorDetails]) -> str:
    reasons = list(dict.fromkeys(map(_reason, errors)))
    reason = " or ".join([reasons[0], *(each.removeprefix("must be ") for each in reasons[1:])])
    if not errors[0]["loc"]:  # The error concerns several settings together, which the message names.
        return f"{reason}."
    name, given = _name(errors[0]["loc"]), errors[0].get("input")
    is_shown = isinstance(given, str | int | float) and name not in SECRET
    return f"{name}: {reason}{f', not {given!r}' if is_shown else ''}."


def _name(place: tuple[int | str, ...]) -> str:
    """Returns the name by which a person knows the setting, or the entry of a list."""
    first, *inside = place
    if first != "models" or len(inside) < 2:
        return str(first)
    return f"models, entry {int(inside[0]) + 1}, {inside[1]}"


# Each of pydantic's kinds of errors is translated for somebody who sets an option.
REASONS = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "extra_forbidden": "is no setting of a model",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "byte_size": "must be a size such as 512MiB or 4GiB",
    "byte_size_unit": "must be a size such as 512MiB or 4GiB",
}


def _reason(error: ErrorDetails) -> str:
    reason = REASONS.get(error["type"], error["msg"].removeprefix("Value error, "))
    return reason.replace("Input should be", "must be")
