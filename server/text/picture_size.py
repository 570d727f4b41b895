"""Says in which size a picture is shown to a model, as transformers' image processor of Qwen3-VL does."""

from math import ceil, floor, sqrt
from typing import NamedTuple

# A picture may be this many times as long as it is wide.
MOST_STRETCHED = 200


class Tiles(NamedTuple):
    """Sides of shown pictures are multiples of ``side`` pixels, and their pixels are between two numbers."""

    side: int
    min_pixels: int
    max_pixels: int


def shown_size(height: int, width: int, tiles: Tiles) -> tuple[int, int]:
    """Returns height and width in which a picture is shown; raises ``ValueError`` if it cannot be."""
    if max(height, width) > MOST_STRETCHED * min(height, width):
        raise ValueError(
            f"it has {width} x {height} pixels: one side may be {MOST_STRETCHED} times the other at most"
        )
    side = tiles.side
    rounded = round(height / side) * side, round(width / side) * side
    if rounded[0] * rounded[1] > tiles.max_pixels:
        shrunk = sqrt(height * width / tiles.max_pixels)
        return tuple(max(side, floor(each / shrunk / side) * side) for each in (height, width))
    if rounded[0] * rounded[1] < tiles.min_pixels:
        grown = sqrt(tiles.min_pixels / (height * width))
        return tuple(ceil(each * grown / side) * side for each in (height, width))
    return rounded
