"""Bugs for the attention kernel, planted in its text: the gates and the check at load must find them."""

import importlib.util
from pathlib import Path
from types import ModuleType

from engine.models import paged_kernels

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
    "heads are mixed up": ("kv_head * SHARED + place % SHARED", "place % SHARED * KV_HEADS + kv_head"),
    "rows begin where the batch begins": (
        "token = tl.load(first_tokens + row) + index\n    position",
        "token = index\n    position",
    ),
}


def planted(bug: str, folder: Path) -> ModuleType:
    """The kernels with ``bug``, as another module."""
    correct, wrong = BUGS[bug]
    assert paged_kernels.__file__ is not None
    text = Path(paged_kernels.__file__).read_text()
    assert text.count(correct) == 1
    file = folder / "planted_kernels.py"
    file.write_text(text.replace(correct, wrong))
    spec = importlib.util.spec_from_file_location("planted_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
