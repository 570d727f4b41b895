"""Pictures over HTTP, with a real worker: in each endpoint's form, and what becomes of hostile ones."""

import io
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image

from tests.pictures import Oracle, save_seeing_chat
from tests.server.running import serving
from truedraft.server.cli.launch import make_app
from truedraft.server.routes import submit
from truedraft.server.settings import Settings

MODEL = "seeing"
LENGTH = 12


@contextmanager
def served(target: str, **settings: Any) -> Iterator[httpx.Client]:
    chosen = {"draft": "none", "device": "cpu", "num_threads": 1, "cache_memory": "16MiB"} | settings
    app = make_app(Settings(target=target, served_model_name=MODEL, **chosen))
    with serving(app) as client:
        yield client


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing_chat(tmp_path_factory.mktemp("serving") / "seeing")


@pytest.fixture(scope="module")
def client(target: str) -> Iterator[httpx.Client]:
    with served(target, max_image_pixels=400_000, max_images=3) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(target: str) -> Oracle:
    return Oracle(target)


def picture(seed: int = 0, size: tuple[int, int] = (50, 33)) -> Image.Image:
    shape = size[1], size[0], 3
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{b64encode(data).decode()}"


def expected(oracle: Oracle, parts: list[str | Image.Image]) -> tuple[int, list[int]]:
    """Returns the number of tokens of a user's message, and what transformers' model writes after it."""
    images = [part for part in parts if not isinstance(part, str)]
    config = oracle.model.config
    inputs = oracle.processor(images=images, return_tensors="pt") if images else {}
    sizes = iter(inputs["image_grid_thw"].prod(1).tolist() if images else ())
    ids = [257, *b"user\n"]
    for part in parts:
        if isinstance(part, str):
            ids += part.encode()
        else:
            ids += [
                config.vision_start_token_id,
                *[config.image_token_id] * (next(sizes) // 4),
                config.vision_end_token_id,
            ]
    ids += [258, *b"\n", 257, *b"assistant\n"]
    given = torch.tensor([ids])
    types = (given == config.image_token_id).int()
    with torch.inference_mode():
        out = oracle.model.generate(
            given, mm_token_type_ids=types, **inputs, max_new_tokens=LENGTH, do_sample=False, pad_token_id=0
        )
    return len(ids), out[0, len(ids) :].tolist()


def ask(client: httpx.Client, content: Any, **more: Any) -> httpx.Response:
    given = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": LENGTH}
    return client.post(
        "/v1/chat/completions", json=given | {"temperature": 0, "return_token_ids": True} | more
    )


def shown(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize("size", [(50, 33), (8, 8), (5, 3), (400, 90), (90, 400), (47, 47)])
def test_chats_answer_as_transformers(client: httpx.Client, oracle: Oracle, size: tuple[int, int]) -> None:
    """Pictures are scaled and cut as by transformers' processor."""
    image = picture(1, size)
    answer = ask(client, [text("What is "), shown(encoded(image)), text("?")]).json()
    num_tokens, ids = expected(oracle, ["What is ", image, "?"])
    assert answer["usage"]["prompt_tokens"] == num_tokens
    assert answer["choices"][0]["token_ids"] == ids


def test_several_pictures_stand_where_they_were_sent(client: httpx.Client, oracle: Oracle) -> None:
    images = [picture(n, size) for n, size in enumerate([(30, 20), (16, 64), (30, 20)])]
    parts: list[Any] = ["a", images[0], images[1], "b", images[2]]
    content = [text(part) if isinstance(part, str) else shown(encoded(part)) for part in parts]
    num_tokens, ids = expected(oracle, parts)
    messages = [{"role": "user", "content": content}]
    counted = client.post("/tokenize", json={"messages": messages}).json()
    assert counted["count"] == num_tokens
    for _ in range(2):  # the second time by the prefix cache
        answer = ask(client, content).json()
        assert answer["choices"][0]["token_ids"] == ids
        assert answer["usage"]["prompt_tokens"] == num_tokens
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= num_tokens - 17
    swapped = ask(client, [content[0], content[4], *content[2:4], content[1]]).json()
    assert (
        swapped["choices"][0]["token_ids"]
        == expected(oracle, ["a", *images[:0:-1][:1], images[1], "b", images[0]])[1]
    )


def test_each_sdk_sends_pictures_in_its_own_form(client: httpx.Client, oracle: Oracle) -> None:
    image = picture(5)
    data = encoded(image)
    num_tokens, ids = expected(oracle, ["See", image])
    words = bytes(each for each in ids if each < 256).decode(errors="replace")
    base = str(client.base_url)
    sdk = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    chat = sdk.chat.completions.create(
        model=MODEL,
        temperature=0,
        max_tokens=LENGTH,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "See"},
                    {"type": "image_url", "image_url": {"url": url(data), "detail": "high"}},
                ],
            }
        ],
    )
    assert chat.choices[0].message.content == words
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == num_tokens
    asked: Any = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "See"},
                {"type": "input_image", "image_url": url(data), "detail": "auto"},
            ],
        }
    ]
    response = sdk.responses.create(model=MODEL, temperature=0, max_output_tokens=LENGTH, input=asked)
    assert response.output_text == words
    assert response.usage is not None
    assert response.usage.input_tokens == num_tokens
    assert sdk.responses.input_tokens.count(model=MODEL, input=asked).input_tokens == num_tokens
    claude = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
    messages: Any = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "See"},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": b64encode(data).decode()},
                },
            ],
        }
    ]
    message = claude.messages.create(
        model=MODEL, max_tokens=LENGTH, messages=messages, extra_body={"temperature": 0}
    )
    block: Any = message.content[0]
    assert block.text == words
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == num_tokens
    assert claude.messages.count_tokens(model=MODEL, messages=messages).input_tokens == num_tokens


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes, *more: bytes) -> bytes:
    """Returns a PNG file of grey levels, whatever its rows hold."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def bomb() -> bytes:
    """Returns rows of a gigabyte, in a megabyte."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(1 << 10)) + packer.flush()


def animated(kind: str) -> bytes:
    return encoded(picture(0), kind, save_all=True, append_images=[picture(1), picture(2)])


SVG = b"<svg xmlns='http://www.w3.org/2000/svg' width='8' height='8'><rect width='8' height='8'/></svg>"
# What a picture is, and what is said of it.
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "30,000 x 30,000": (lambda: png(30000, 30000, bomb()), "900000000|30000 x 30000 pixels"),
    "a text of a gigabyte": (
        lambda: png(8, 8, zlib.compress(bytes(72)), chunk(b"zTXt", b"a\0\0" + bomb())),
        "damaged",
    ),
    "a profile of a gigabyte": (
        lambda: png(30000, 8, zlib.compress(bytes(72)), chunk(b"iCCP", b"a\0\0" + bomb())),
        "shown|damaged",
    ),
    "truncated JPEG": (lambda: encoded(picture(), "JPEG")[:-300], "damaged"),
    "truncated PNG": (lambda: encoded(picture())[:-300], "damaged"),
    "nothing": (lambda: b"", "no JPEG, PNG, WebP or GIF"),
    "SVG": (lambda: SVG, "no JPEG, PNG, WebP or GIF"),
    "TIFF": (lambda: encoded(picture(), "TIFF"), "no JPEG, PNG, WebP or GIF"),
    "BMP": (lambda: encoded(picture(), "BMP"), "no JPEG, PNG, WebP or GIF"),
    "PDF": (lambda: encoded(picture(), "PDF"), "no JPEG, PNG, WebP or GIF"),
    "animated GIF": (lambda: animated("GIF"), "animated"),
    "animated WebP": (lambda: animated("WEBP"), "animated"),
    "animated PNG": (lambda: animated("PNG"), "animated"),
    "a line": (lambda: encoded(picture(0, (1000, 2))), "200 times the other"),
    "too many pixels": (lambda: encoded(picture(0, (1000, 401))), "max_image_pixels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_pictures_get_a_sentence(client: httpx.Client, name: str) -> None:
    make, words = REFUSED[name]
    answer = ask(client, [text("x"), shown(make())])
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    assert error["param"] == "messages.0.content.1"
    assert any(each in error["message"] for each in words.split("|")), error["message"]


def exif(rotation: int) -> Image.Exif:
    notes = Image.Exif()
    notes[0x0112] = rotation
    return notes


def deep() -> bytes:
    """Returns 16 bits of grey, whose upper 8 are those of ``as_grey``."""
    levels = np.asarray(picture().convert("L")).astype(np.uint16)
    return encoded(Image.fromarray(levels * 256 + 77))


def seen_through() -> bytes:
    image = picture().convert("RGBA")
    image.putalpha(Image.new("L", image.size, 0))
    return encoded(image)


# What is sent, and the picture that it is.
READ: dict[str, tuple[Callable[[], bytes], Callable[[], Image.Image]]] = {
    "GIF": (lambda: encoded(picture().convert("P"), "GIF"), lambda: picture().convert("P").convert("RGB")),
    "WebP": (lambda: encoded(picture(), "WEBP", lossless=True), picture),
    "turned by a camera": (
        lambda: encoded(picture(), exif=exif(6)),
        lambda: picture().transpose(Image.Transpose.ROTATE_270),
    ),
    "rows of a gigabyte": (lambda: png(50, 33, bomb()), lambda: Image.new("RGB", (50, 33))),
    "turned to nowhere": (lambda: encoded(picture(), exif=exif(77)), picture),
    "grey": (lambda: encoded(picture().convert("L")), lambda: picture().convert("L").convert("RGB")),
    "16 bits of grey": (deep, lambda: picture().convert("L").convert("RGB")),
    "black and white": (
        lambda: encoded(picture().convert("1")),
        lambda: picture().convert("1").convert("RGB"),
    ),
    "nothing on white": (seen_through, lambda: Image.new("RGB", (50, 33), "white")),
    "JPEG in CMYK": (
        lambda: encoded(picture().convert("CMYK"), "JPEG", quality=95),
        lambda: Image.open(io.BytesIO(encoded(picture().convert("CMYK"), "JPEG", quality=95))).convert("RGB"),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_odd_pictures_are_read(client: httpx.Client, oracle: Oracle, name: str) -> None:
    make, shows = READ[name]
    answer = ask(client, [text("x"), shown(make())])
    assert answer.status_code == 200, answer.text[:300]
    assert answer.json()["choices"][0]["token_ids"] == expected(oracle, ["x", shows()])[1]


GOOD = encoded(picture())
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no URL": ({"type": "image_url"}, "'data:' URL"),
    "a file": ({"type": "image_url", "image_url": {"file_id": "x"}}, "'data:' URL"),
    "an odd detail": ({"type": "image_url", "image_url": {"url": url(GOOD), "detail": "huge"}}, "detail is"),
    "no comma": ({"type": "image_url", "image_url": "data:image/png;base64"}, "no comma"),
    "no base64": ({"type": "image_url", "image_url": "data:image/png;base64,%%%"}, "no base64"),
    "a path": ({"type": "image_url", "image_url": "file:///etc/passwd"}, "neither a 'data:' URL"),
    "another host": (
        {"type": "image_url", "image_url": "https://example.com/a.png"},
        "allowed_media_domains",
    ),
    "a host of this network": (
        {"type": "image_url", "image_url": "http://127.0.0.1/a.png"},
        "allowed_media_domains",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_parts_get_a_sentence(client: httpx.Client, name: str) -> None:
    part, words = MALFORMED[name]
    answer = ask(client, [part])
    assert answer.status_code == 400, answer.text[:300]
    assert words in answer.json()["error"]["message"], answer.text


def test_what_cannot_be_shown_is_refused(client: httpx.Client) -> None:
    good = shown(GOOD)
    assistant = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [good]}]
    for body, words in (
        ({"messages": [{"role": "system", "content": [good]}]}, "describe the image"),
        ({"messages": assistant}, "describe the image"),
        ({"messages": [{"role": "user", "content": [good] * 4}]}, "max_images"),
        ({"messages": [{"role": "user", "content": [good, text("<|image_pad|>")]}]}, "leave it out"),
        ({"messages": [{"role": "user", "content": [good]}], "truncate_prompt_tokens": 9}, "truncate"),
        ({"messages": [{"role": "user", "content": [good]}], "speculation": {"trace": True}}, "trace"),
    ):
        answer = client.post("/v1/chat/completions", json={"model": MODEL, "max_tokens": 3} | body)
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"], answer.text


def test_pictures_of_open_requests_are_bounded(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "MOST_PIXEL_BYTES", 10)
    answer = ask(client, [shown(GOOD)])
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    monkeypatch.undo()
    assert ask(client, [shown(GOOD)]).status_code == 200


def test_low_detail_is_fewer_pixels(target: str) -> None:
    """OpenAI's low detail is 512 pixels each way at most."""
    large = encoded(picture(0, (900, 600)), "JPEG")
    with served(target, max_image_tokens=40) as client:
        assert client.get("/props").json()["modalities"]["vision"]
        low = {"type": "image_url", "image_url": {"url": url(large), "detail": "low"}}
        count = [
            client.post("/tokenize", json={"messages": [{"role": "user", "content": [part]}]}).json()["count"]
            for part in (low, shown(large))
        ]
        assert count[0] == count[1] < 40 + 30


def test_a_model_without_its_tower_sees_nothing(target: str) -> None:
    with served(target, max_images=0) as client:
        answer = ask(client, [shown(GOOD)])
        assert answer.status_code == 400
        assert "the model sees no pictures here" in answer.json()["error"]["message"]
        assert ask(client, [text("x")]).status_code == 200
