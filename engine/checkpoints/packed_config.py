"""Reads what a ``quantization_config`` says of layers whose codes are packed into words.

GPTQ's, AWQ's and compressed-tensors' configs say the same things under other names, and AutoRound's config
says which of the former two its layers follow. ``packed`` compares what is said here with the tensors.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from truedraft.engine.errors import QuantizationError

GPTQ, AWQ, COMPRESSED = "gptq", "awq", "compressed-tensors"
AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round", "intel/auto_round")
# AutoRound packs its layers in one of these formats.
AUTO_ROUND_FORMATS = {"auto_round:auto_gptq": GPTQ, "auto_round:auto_awq": AWQ}
PACKED = "pack-quantized"
# Codes of these widths fill words of 32 bits.
WIDTHS = (2, 4, 8)
# Layers of this many bits are not quantised.
WHOLE = (16, 32)
# A group of this size means the whole row.
WHOLE_ROW = -1
FIRST_FORMAT, SECOND_FORMAT = "gptq", "gptq_v2"
# With these orders of the inputs a group's inputs are neighbours all the same.
ORDERED = (None, False, "static", "weight")


@dataclass(frozen=True)
class Said:
    """Holds what a config says.

    ``bits`` and ``group_sizes`` are those that layers may have, empty if nothing is said. ``is_symmetric``
    says whether all zero points are in the middle; None if nothing is said. ``checkpoint_format`` is GPTQ's,
    whose first format stores zero points less one. ``is_ordered`` says that a group's inputs are neighbours.
    """

    method: str
    bits: frozenset[int]
    group_sizes: frozenset[int]
    is_symmetric: bool | None
    checkpoint_format: str = FIRST_FORMAT
    is_ordered: bool = True


def read_said(quantization: dict[str, Any]) -> Said | None:
    """Returns what the config says of packed layers. Returns None for methods and formats of other tensors;
    raises ``QuantizationError`` for variants of these that are not supported."""
    method = str(quantization.get("quant_method", "")).lower()
    if method in AUTO_ROUND:
        form = str(quantization.get("packing_format", "")).lower()
        if form not in AUTO_ROUND_FORMATS:
            raise QuantizationError(
                f"it is quantised by AutoRound with the packing_format {form or 'unsaid'}; "
                f"{' and '.join(AUTO_ROUND_FORMATS)} are supported"
            )
        method = AUTO_ROUND_FORMATS[form]
    if method in (GPTQ, AWQ):
        return _of_words(method, quantization)
    groups = packed_groups(quantization)
    return _of_groups(groups) if method == COMPRESSED and groups else None


def _of_words(method: str, quantization: dict[str, Any]) -> Said:
    """Reads the settings of GPTQ and AWQ."""
    layout = str(quantization.get("version") or quantization.get("format") or "gemm").lower()
    words = str(quantization.get("pack_dtype") or "int32").lower().removeprefix("torch.")
    form = _same(quantization, ("checkpoint_format", "format"), str) if method == GPTQ else None
    form = str(form or FIRST_FORMAT).lower()
    # Some layers may have settings of their own.
    others = [*_parts(quantization.get("dynamic")), *_parts(quantization.get("extra_config"))]
    bits = _numbers([quantization, *others], ("bits", "w_bit"))
    _refuse(
        method,
        {
            **{
                f"{width} bits": True
                for width in sorted(bits - {*(WIDTHS if method == GPTQ else (4,)), 16, 32})
            },
            f"the layout {layout}": method == AWQ and layout != "gemm",
            f"the checkpoint format {form}": form not in (FIRST_FORMAT, SECOND_FORMAT),
            f"words of {words}": words != "int32",
        },
    )
    has_zeros = quantization.get("zero_point") if method == AWQ else None
    symmetric = quantization.get("sym") if has_zeros is None else not has_zeros
    return Said(
        method,
        bits - {*WHOLE},
        _numbers([quantization, *others], ("group_size", "q_group_size")),
        None if symmetric is None else bool(symmetric),
        form,
        not quantization.get("desc_act"),
    )


def packed_groups(quantization: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns compressed-tensors' groups of layers whose codes are packed; a mixed format may have some of
    them."""
    return [group for group in _groups(quantization) if _is_packed(group, quantization)]


def other_groups(quantization: dict[str, Any]) -> list[dict[str, Any]]:
    return [group for group in _groups(quantization) if not _is_packed(group, quantization)]


def _groups(quantization: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(quantization.get("config_groups") or {}).values()]


def _is_packed(group: dict[str, Any], quantization: dict[str, Any]) -> bool:
    """Tells whether a group's codes are packed; a mixed format names the format of each group."""
    return (group.get("format") or quantization.get("format")) == PACKED


def _of_groups(groups: list[dict[str, Any]]) -> Said:
    weights = [group.get("weights") or {} for group in groups]
    bits = _numbers(weights, ("num_bits",))
    strategies = {str(each.get("strategy")) for each in weights}
    types = {str(each.get("type", "int")) for each in weights}
    orders = {each.get("actorder") for each in weights}
    _refuse(
        COMPRESSED,
        {
            **{f"{width} bits": True for width in sorted(bits - {*WIDTHS})},
            **{f"the strategy {name}": name not in ("group", "channel") for name in sorted(strategies)},
            **{f"codes of the type {name}": name != "int" for name in sorted(types)},
            "quantised activations": any(group.get("input_activations") is not None for group in groups),
        },
    )
    symmetric = {each.get("symmetric") for each in weights}
    sizes = _numbers([each for each in weights if each.get("strategy") == "group"], ("group_size",))
    if "channel" in strategies:
        sizes |= {WHOLE_ROW}
    return Said(
        COMPRESSED,
        bits,
        sizes,
        symmetric.pop() if len(symmetric) == 1 else None,
        is_ordered=orders <= {*ORDERED},
    )


def _parts(settings: Any) -> Iterator[dict[str, Any]]:
    """Yields the settings of some layers together with the patterns that name these layers."""
    yield from (each for each in (settings or {}).values() if isinstance(each, dict))


def _numbers(parts: Iterable[dict[str, Any]], names: tuple[str, ...]) -> frozenset[int]:
    found = (_same(part, names, _number) for part in parts)
    return frozenset(number for number in found if number is not None)


def _same(settings: dict[str, Any], names: tuple[str, ...], read: Any) -> Any:
    """Returns the value under any of the ``names``; raises ``QuantizationError`` if two of them differ."""
    said = {name: read(value) for name in names if (value := settings.get(name)) is not None}
    if len(set(said.values())) > 1:
        words = " and ".join(f"{name} {value}" for name, value in said.items())
        raise QuantizationError(f"its quantization_config says both {words}")
    return next(iter(said.values()), None)


def _number(value: Any) -> int:
    """Returns a whole number, which may be written as a text."""
    try:
        if isinstance(value, bool) or int(value) != float(value):
            raise ValueError(value)
        return int(value)
    except (TypeError, ValueError) as error:
        raise QuantizationError(f"its quantization_config has {value!r} in place of a number") from error


def _refuse(method: str, unsupported: dict[str, bool]) -> None:
    if found := [words for words, is_so in unsupported.items() if is_so]:
        raise QuantizationError(
            f"it is quantised by {method} with {' and '.join(found)}, which is not supported"
        )
