"""Bugs for the kernels, planted in their text, which the gates must find; the check at load, attention's."""

import importlib.util
from pathlib import Path
from types import ModuleType

from truedraft.engine.cuda import kernels, pointwise_kernels

BUGS = {
    "a query does not see itself": ("key[None, :] <= position[:, None]", "key[None, :] < position[:, None]"),
    "the window has one key too many": ("> position[:, None] - WINDOW", ">= position[:, None] - WINDOW"),
    "what lies behind the keys is loaded": ("is_key = key < end", "is_key = key < end + 1"),
    "all rows read the first one's blocks": ("tables + row * max_blocks", "tables"),
    "shares overlap": ("begin += split * share", "begin += tl.maximum(split * share - 1, 0)"),
    "shares are joined as if they weighed the same": (
        "weights = tl.exp2(log_sum - tl.max(log_sum, 0))",
        'weights = tl.where(log_sum > float("-inf"), 1.0, 0.0)',
    ),
    "the sum does not shrink": ("total = total * shrink", "total = total"),
    "pieces are the first row's": ("row = tl.sum((ends <= piece).to(tl.int32), 0)", "row = piece * 0"),
    "every other piece is left out": ("tl.num_programs(0)):", "2 * tl.num_programs(0)):"),
    "all pieces have the sink": ("is_counted = split == 0", "is_counted = split >= 0"),
    "heads are mixed up": ("kv_head * SHARED + place % SHARED", "place % SHARED * KV_HEADS + kv_head"),
    "rows begin where the batch begins": (
        "token = tl.load(first_tokens + row) + index\n        position",
        "token = index\n        position",
    ),
}
SMALL_BUGS = {
    "the angle turns the wrong way": ("x * c + swapped * s", "x * c - swapped * s"),
    "halves are not swapped": ("tl.where(number < half, number + half, number - half)", "number"),
    "keys are stored unturned": ("place + number, rotated", "place + number, x.to(keys.dtype.element_ty)"),
    "keys lie in the order of the tokens": ("(slot * KV_HEADS + head", "(token * KV_HEADS + head"),
    "all values are the first head's": ("kv_head = head - HEADS - KV_HEADS", "kv_head = head * 0"),
    "the gate is a sigmoid": ("gate / (1 + tl.exp(-gate))", "1 / (1 + tl.exp(-gate))"),
    "the last number is left out": (
        "number < SIZE\n    start = gate_up",
        "number < SIZE - 1\n    start = gate_up",
    ),
    "gate and up are mixed up": ("start + SIZE + number", "start + number"),
    "the mean counts what pads a row": (" / SIZE + eps", " / PADDED_SIZE + eps"),
    "nothing keeps a norm from zero": (" / SIZE + eps", " / SIZE"),
    "heads lie side by side": ("x + token * X_STRIDE", "x + token * HEADS * SIZE"),
    "all heads have the first one's weights": ("weight + head * SIZE", "weight"),
    "a residual is scaled": ("normed += tl.load(residual", "normed *= tl.load(residual"),
}


def planted(bug: str, folder: Path) -> ModuleType:
    """The kernels with ``bug``, as another module."""
    return planted_in(kernels if bug in BUGS else pointwise_kernels, *(BUGS | SMALL_BUGS)[bug], folder)


def planted_in(module: ModuleType, correct: str, wrong: str, folder: Path) -> ModuleType:
    """Another module, whose text has ``wrong`` in place of what is ``correct``."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    assert text.count(correct) == 1
    file = folder / "planted_kernels.py"
    file.write_text(text.replace(correct, wrong))
    spec = importlib.util.spec_from_file_location("planted_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    planted_module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted_module)
    return planted_module
