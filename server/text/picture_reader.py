"""A process that reads pictures within limits. Started by ``server.text.pictures``.

A picture of a few kilobytes may ask for gigabytes, and decoders have had faults. Lines of JSON come in, each
with the URL of a picture and how it is shown; a line with its pixels, or with what is wrong, goes out.
"""

import io
import signal
import sys
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from typing import Any
from urllib.parse import unquote_to_bytes

from PIL import Image, ImageOps, UnidentifiedImageError

from truedraft.server.text.helper_process import FETCH_SECONDS, answer_lines, limit_memory
from truedraft.server.text.picture_fetch import FetchError, fetched
from truedraft.server.text.picture_size import Tiles, shown_size

# All that is read here gets this much address space.
MAX_MEMORY = 3 << 29
FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
# JPEG files of phones may have a second picture, which is not what they show.
OF_ONE_PICTURE = ("JPEG", "MPO")
WHITE = (255, 255, 255, 255)


class PictureError(Exception):
    """Says what is wrong with a picture."""


def main() -> int:
    Image.init()
    limit_memory(MAX_MEMORY)
    answer_lines(outcome_of)
    return 0


def outcome_of(question: dict[str, Any]) -> dict[str, Any]:
    try:
        data = contents(question["url"], question["domains"])
        picture = read(data, question["max_pixels"])
        height, width = shown_size(picture.height, picture.width, Tiles(*question["tiles"]))
        shown = picture.resize((width, height), resample=question["resample"])
        return {"height": height, "width": width, "pixels": b64encode(shown.tobytes()).decode()}
    except (PictureError, FetchError, ValueError) as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"it takes more than {MAX_MEMORY >> 20} MiB of memory"}


def contents(url: str, domains: list[str]) -> bytes:
    """Returns the bytes of a picture."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "data":
        # Neither names nor slow hosts can hold the process for longer: the signal ends it.
        signal.setitimer(signal.ITIMER_REAL, FETCH_SECONDS + 1)
        try:
            return fetched(url, domains)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    kind, comma, data = rest.partition(",")
    if not comma:
        raise PictureError("its 'data:' URL has no comma, after which the data begins")
    if not kind.lower().endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return b64decode("".join(data.split()), validate=True)
    except (Base64Error, ValueError) as error:
        raise PictureError(f"its 'data:' URL is no base64: {error}") from error


def read(data: bytes, max_pixels: int) -> Image.Image:
    """Returns the picture as it is to be seen: turned, in red, green and blue, on white."""
    Image.MAX_IMAGE_PIXELS = None  # the limit is a setting here
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            if opened.width * opened.height > max_pixels:
                raise PictureError(
                    f"it has {opened.width} x {opened.height} pixels, and {max_pixels} are allowed "
                    "(max_image_pixels)"
                )
            if opened.format not in OF_ONE_PICTURE and getattr(opened, "n_frames", 1) > 1:
                raise PictureError("it is animated: send one of its pictures")
            opened.load()
            return coloured(turned(opened))
    except (PictureError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise PictureError("it is no JPEG, PNG, WebP or GIF") from error
    except Exception as error:  # decoders fail in any way
        raise PictureError(f"it is damaged: {str(error)[:200] or type(error).__name__}") from error


def turned(picture: Image.Image) -> Image.Image:
    """Returns the picture as its camera was held, if that can be read."""
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:  # notes of a camera may have any fault; what they say of a picture is not the picture
        return picture


def coloured(picture: Image.Image) -> Image.Image:
    """Returns red, green and blue of the picture, on white where one can see through it."""
    if picture.mode.startswith("I"):  # 16 bits of grey
        if "transparency" in picture.info:
            raise PictureError("it has 16 bits of grey of which one is transparent: save it in 8 bits")
        grey = picture.convert("I").point(lambda level: level / 256)
        return grey.convert("L").convert("RGB")
    if picture.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in picture.info:
        seen = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, WHITE), seen).convert("RGB")
    return picture.convert("RGB")


if __name__ == "__main__":
    sys.exit(main())
