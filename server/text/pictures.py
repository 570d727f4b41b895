"""Shows the pictures of a conversation to a model that sees: pixels, and places for them in the prompt.

A process of its own reads them (``picture_reader``). The chat template writes one placeholder for each; the
prompt gets as many as the picture has tokens.
"""

import json
from base64 import b64decode
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from truedraft.engine.messages import Picture, VisionFacts
from truedraft.server.errors import InvalidRequestError, UnsupportedParameterError
from truedraft.server.schemas.chat import Message
from truedraft.server.schemas.foreign_parts import NO_PICTURES, OtherPart
from truedraft.server.text.template_process import TemplateProcesses, helper

# A picture with ``detail`` "low" is shown with at most this many pixels.
LOW_DETAIL = 512 * 512


class Sight(NamedTuple):
    """Says how a model sees pictures, which may have ``max_pixels`` as they are sent, and come from
    ``domains``."""

    facts: VisionFacts
    max_pixels: int
    domains: Sequence[str]


class Shown(NamedTuple):
    """Is a picture as the model is shown it."""

    height: int
    width: int
    pixels: bytes


def is_picture(part: object) -> bool:
    return isinstance(part, OtherPart) and bool(part.place)


def pictures_in(messages: Sequence[Message]) -> list[OtherPart]:
    """Returns the pictures of messages, in their order."""
    contents = [message.content for message in messages if isinstance(message.content, list)]
    return [part for content in contents for part in content if isinstance(part, OtherPart) and part.place]


def shown(messages: Sequence[Message], sight: Sight | None) -> list[Shown]:
    """Reads the pictures of messages. Takes a moment in another process: not for the event loop's thread."""
    parts = pictures_in(messages)
    if not parts:
        return []
    if sight is None:
        raise no_pictures(parts[0])
    most = sight.facts.max_images
    if len(parts) > most:
        raise InvalidRequestError(
            f"There are {len(parts)} pictures, but at most {most} are allowed (max_images).",
            param=parts[most].place,
        )
    return [_read(part, sight) for part in parts]


def no_pictures(part: OtherPart) -> UnsupportedParameterError:
    """Returns the error of a picture that nobody looks at."""
    where = f"{part.place}.type"
    return UnsupportedParameterError(
        f"'{where}' is not supported as {part.type!r}: {NO_PICTURES}.", param=where
    )


def _read(part: OtherPart, sight: Sight) -> Shown:
    facts = sight.facts
    try:
        url, detail = part.picture
    except ValueError as error:
        raise InvalidRequestError(f"{part.place} has no picture: {error}.", param=part.place) from error
    most = min(facts.max_pixels, LOW_DETAIL) if detail == "low" else facts.max_pixels
    outcome = picture_process().ask(
        {
            "url": url,
            "domains": list(sight.domains),
            "max_pixels": sight.max_pixels,
            "tiles": (facts.tile, min(facts.min_pixels, most), most),
            "resample": facts.resample,
        }
    )
    if "error" in outcome:
        raise InvalidRequestError(
            f"The picture at {part.place} cannot be shown: {outcome['error']}.", param=part.place
        )
    return Shown(outcome["height"], outcome["width"], b64decode(outcome["pixels"]))


def check_marks(mark: str, given: Any, pictures: Sequence[Shown], param: str) -> None:
    """Refuses what the template is given with pictures if a text in it has the mark of one: nobody could tell
    it from a picture."""
    if pictures and json.dumps(mark)[1:-1] in json.dumps(given):
        raise InvalidRequestError(
            f"A text has {mark!r}, by which the model is shown pictures: leave it out.", param=param
        )


def placed(
    token_ids: Sequence[int], pictures: Sequence[Shown], facts: VisionFacts, param: str
) -> tuple[list[int], list[Picture]]:
    """Returns the prompt with as many placeholders as each picture has tokens, and the pictures."""
    found = [place for place, token_id in enumerate(token_ids) if token_id == facts.token_id]
    if len(found) != len(pictures):
        raise InvalidRequestError(
            f"The model's chat template has written {len(found)} pictures, and there are {len(pictures)}.",
            param=param,
        )
    whole: list[int] = []
    placed_ones = []
    before = 0
    for place, each in zip(found, pictures, strict=True):
        whole += token_ids[before:place]
        placed_ones.append(Picture(len(whole), *each))
        whole += [facts.token_id] * facts.num_tokens(each.height, each.width)
        before = place + 1
    return whole + list(token_ids[before:]), placed_ones


@cache
def picture_process() -> TemplateProcesses:
    """Returns the processes that read pictures."""
    if find_spec("PIL") is None:
        raise UnsupportedParameterError(
            "Pictures need the package pillow on the server: pip install 'truedraft[images]'."
        )
    return helper("picture_reader", "reads pictures")
