"""GGUF files: their metadata, where their tensors lie, and the tokenizer that they describe.

Both processes read them, the front end without torch. ``gguf``'s own reader takes seconds for a vocabulary of
usual size, as it makes an array of every string; this one takes a tenth of a second.
"""

import math
import struct
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Types of metadata, by their numbers in the file.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# More is no model: it is what a damaged file says.
MAX_DIMENSIONS = 4

# Text is cut before tokens are looked for, by rules that a file names only. transformers knows most of the
# names; these split digits one by one, and then as GPT-2 does.
DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
GPT2_SPLITS = (None, "gpt-2")


class GgufError(ValueError):
    """A GGUF file cannot be read or is not supported; the message is for the user."""


class TensorPlace(NamedTuple):
    """``shape``: rows first. ``type``: its number in ggml. ``offset`` from the start of the file."""

    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """``data`` is the mapped file."""

    path: str
    data: mmap
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorPlace] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))


def is_gguf(path: str) -> bool:
    return path.endswith(SUFFIX)


def find_gguf(path: str) -> Path:
    """The file itself, or that of a hub id with the file's name behind it; ``GgufError``."""
    local = Path(path).expanduser()
    owner, _, rest = path.partition("/")
    repository, _, name = rest.partition("/")
    if local.exists() or not name or owner in ("", ".", "..", "~"):
        return local
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(f"{owner}/{repository}", name))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise GgufError(f"there is no file {path}, and none is found on the hub under that name") from error


def read_gguf(path: str) -> GgufFile:
    """What the file says before its tensors, with lists and texts; ``GgufError``."""
    try:
        with find_gguf(path).open("rb") as opened:
            data = mmap(opened.fileno(), 0, access=ACCESS_READ)
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise GgufError(f"{path} is empty") from error
    try:
        return _Reader(path, data).read()
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise GgufError(f"{path} is cut off or damaged: its header does not end where it should") from error


class _Reader:
    def __init__(self, path: str, data: mmap) -> None:
        self.file = GgufFile(path, data)
        self.position = 0

    def read(self) -> GgufFile:
        file, path = self.file, self.file.path
        if file.data[:4] != MAGIC:
            raise GgufError(f"{path} is not a GGUF file: it does not begin with GGUF")
        self.position = 4
        (version,) = self._unpack("<I")
        if version not in VERSIONS:
            raise GgufError(f"{path} is of GGUF version {version}; versions 2 and 3 (little-endian) are read")
        num_tensors, num_values = self._unpack("<QQ")
        for _ in range(num_values):
            name = self._string()
            (kind,) = self._unpack("<I")
            file.metadata[name] = self._value(kind)
        places = [(self._string(), self._place()) for _ in range(num_tensors)]
        alignment = file.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"{path} is damaged: its alignment is {alignment}")
        start = -(-self.position // alignment) * alignment
        for name, place in places:
            if name in file.tensors:
                raise GgufError(f"{path} is damaged: it has two tensors {name}")
            file.tensors[name] = place._replace(offset=start + place.offset)
        return file

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.file.data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        end = self.position + length
        if end > len(self.file.data):
            raise struct.error
        text = self.file.data[self.position : end].decode()
        self.position = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._unpack("<" + SCALARS[kind])[0]
        if kind != ARRAY:
            raise GgufError(f"{self.file.path} is damaged: it has metadata of the unknown type {kind}")
        kind, count = self._unpack("<IQ")
        if count > len(self.file.data):
            raise struct.error
        if kind in SCALARS:
            return list(self._unpack(f"<{count}{SCALARS[kind]}"))
        return [self._value(kind) for _ in range(count)]

    def _place(self) -> TensorPlace:
        (dimensions,) = self._unpack("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise struct.error
        shape = self._unpack(f"<{dimensions}Q")
        kind, offset = self._unpack("<IQ")
        if math.prod(shape) == 0:
            raise struct.error
        return TensorPlace(tuple(reversed(shape)), kind, offset)


def load_pretrained_tokenizer(path: str) -> Any:
    """Loads transformers' tokenizer of a GGUF file, a folder or a hub id. Slow: imports transformers.

    It neither cuts nor pads a text, whatever its file says: training writes both into tokenizer.json.
    Raises ``ValueError`` in one line if there is none that can be loaded.
    """
    tokenizer = _gguf_tokenizer(path) if is_gguf(path) else _auto_tokenizer(path)
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        fast.no_truncation()
        fast.no_padding()
    return tokenizer


def _auto_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # classes rely on files that may be missing, the Rust core has no other error
        reason = " ".join(str(error).split())[:300] or "no reason is given"
        raise ValueError(
            f"{path} has no tokenizer that can be loaded: {type(error).__name__}: {reason}"
        ) from error


def _gguf_tokenizer(path: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    file = read_gguf(path)

    metadata = file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise GgufError(f"{file.path} has no tokenizer (tokenizer.ggml.tokens)")
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            if not 0 <= token_id < len(tokens):
                raise GgufError(f"{file.path} is damaged: its {key}_token_id {token_id} is no token")
            special[f"{name}_token"] = tokens[token_id]
    is_llama = metadata.get("tokenizer.ggml.model") == "llama"
    return PreTrainedTokenizerFast(
        tokenizer_object=_fast_tokenizer(file),
        chat_template=metadata.get("tokenizer.chat_template"),
        # llama.cpp begins with it where such a file does not say.
        add_bos_token=metadata.get("tokenizer.ggml.add_bos_token", is_llama),
        add_eos_token=metadata.get("tokenizer.ggml.add_eos_token", False),
        **special,
    )


def _fast_tokenizer(file: GgufFile) -> Any:
    from tokenizers import decoders, pre_tokenizers
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    metadata = file.metadata
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    known = (*GPT2_SPLITS, *DIGIT_SPLITS, *mapping.GGUF_PRE_TOKENIZER_SPLITS)
    if kind not in ("gpt2", "llama"):
        raise GgufError(f"{file.path} has a tokenizer of the kind {kind}; gpt2 and llama are supported")
    if kind == "gpt2" and split not in known:
        raise GgufError(f"{file.path} cuts text by the rules {split}, which are not supported")
    named = mapping.GGUF_TOKENIZER_MAPPING["tokenizer"]
    fields = {
        ours: metadata[f"tokenizer.{key}"] for key, ours in named.items() if f"tokenizer.{key}" in metadata
    }
    try:
        fast, _ = mapping.convert_gguf_tokenizer(file.architecture, fields)
    except Exception as error:  # of the Rust core, which has no other
        raise GgufError(f"the tokenizer in {file.path} is damaged: {error}") from error
    if kind == "gpt2" and split in DIGIT_SPLITS:
        fast.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if kind == "llama" and metadata.get("tokenizer.ggml.add_space_prefix") is False:
        fast.normalizer = None
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        fast.decoder = decoders.Sequence(parts)
    return fast
