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
    side, most = tiles.side, max(1, tiles.max_pixels // tiles.side**2)
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > tiles.max_pixels:
        shrunk = sqrt(height * width / tiles.max_pixels)
        rows, columns = (max(1, floor(each / shrunk / side)) for each in (height, width))
    elif rows * columns * side**2 < tiles.min_pixels:
        grown = sqrt(tiles.min_pixels / (height * width))
        rows, columns = ceil(height * grown / side), ceil(width * grown / side)
    # transformers may round beyond the largest number, where that is small: the longer side gives way.
    if rows > columns:
        rows = min(rows, max(1, most // columns))
    columns = min(columns, max(1, most // rows))
    return rows * side, columns * side
