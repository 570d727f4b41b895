"""Handles numbers of a JSON schema exactly: their values, and expressions of the texts between two of them.

A double has 53 bits, but JSON Schema compares numbers as mathematics does. So a bound is a fraction here, a
constant keeps the text it came as, and no number is rounded. The module knows nothing of schemas.
"""

import json
import math
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

# A number that nothing bounds ends nevertheless: after this many digits before and after its point.
MOST_DIGITS = 15
MOST_DECIMALS = 16
# Numbers below or above a bound have up to this many decimals, however large the bound is.
LEAST_DECIMALS = 6
# This is the largest number that a double holds: beyond it a bound bounds nothing, or lets nothing through.
MOST_PLACES = 330
# Up to this many multiples are written one by one.
MOST_MULTIPLES = 100
# llguidance has one state for each unit of the multiple, zeros at its end aside.
MOST_UNITS = 100_000

END = Fraction(10**MOST_DIGITS)
# The exponent stays so small that a double holds the number, and no validator reads infinity.
EXPONENT = "(?:[eE][+-]?(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-8][0-9]))?"
ANY_NUMBER = rf"-?(?:0|[1-9][0-9]{{0,{MOST_DIGITS - 1}}})(?:\.[0-9]{{1,{MOST_DECIMALS}}})?{EXPONENT}"


class WrittenFloat(float):
    """Is a number that keeps its text, because the double differs from what the text says."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> "WrittenFloat":
        written = super().__new__(cls, text)
        written.text = text
        return written


def read_float(text: str) -> float:
    """Reads a number of JSON that is no integer, with its text unless that is how its double is written."""
    value = float(text)
    return value if repr(value) == text else WrittenFloat(text)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def text_of(value: Any) -> str:
    return value.text if isinstance(value, WrittenFloat) else json.dumps(value)


def exactly(value: Any) -> Fraction:
    """Returns the exact value of a number's text; raises ``ValueError`` for a number that no double comes
    near."""
    decimal = Decimal(text_of(value)) if isinstance(value, float) else Decimal(value)
    if not decimal.is_finite() or abs(decimal.adjusted()) > MOST_PLACES:
        raise ValueError(f"it has a number of more than {MOST_PLACES} places")
    return Fraction(decimal)


def is_beyond(value: Any) -> bool:
    """Tells whether every number that can be written here lies between this one and its negative."""
    decimal = Decimal(text_of(value)) if isinstance(value, float) else Decimal(value)
    return decimal.is_infinite() or (bool(decimal) and decimal.adjusted() > MOST_PLACES)


class Bound(NamedTuple):
    """Is one end of a range. ``is_strict`` says that the number itself is outside."""

    value: Fraction
    is_strict: bool = False


def tighter(first: Bound | None, other: Bound | None, *, upper: bool) -> Bound | None:
    if first is None or other is None:
        return first or other
    if first.value == other.value:
        return first if first.is_strict else other
    return first if (first.value < other.value) is upper else other


def is_within(value: Fraction, low: Bound | None, high: Bound | None) -> bool:
    if low is not None and (value < low.value or (low.is_strict and value == low.value)):
        return False
    return high is None or value < high.value or (not high.is_strict and value == high.value)


class Range(NamedTuple):
    """Holds the numbers between two bounds that are multiples of ``multiple``, unless that is None."""

    is_integer: bool
    low: Bound | None
    high: Bound | None
    multiple: Fraction | None

    def expression(self) -> str:
        """Returns a term of llguidance's Lark: an expression, texts or a schema; it is empty if no number is
        in the range. Raises ``ValueError`` for ranges that cannot be written."""
        if self == Range(False, None, None, None):
            return f"/{ANY_NUMBER}/"
        low, high = self._with_ends()
        if low.value > high.value or (low.value == high.value and (low.is_strict or high.is_strict)):
            return ""
        multiple = self.multiple
        if self.is_integer:
            multiple = _multiple_of_both(multiple or Fraction(1), Fraction(1))
        if multiple in (None, 1) and self.is_integer:
            written = _integers(_first(low), -_first(_negative(high)))
        elif multiple is None:
            written = _decimals(low, high, self._num_decimals())
        else:
            return _multiples(multiple, low, high, is_integer=self.is_integer)
        return f"/{written}/" if written else ""

    def _with_ends(self) -> tuple[Bound, Bound]:
        """Returns the range with both ends: without a bound a number has as many digits as said above, or one
        more than its other bound."""
        low, high = self.low, self.high
        if low is None:
            low = _negative(_end(high and _negative(high)))
        return low, high or _end(low)

    def _num_decimals(self) -> int:
        """Returns the largest number of decimals with which the double of a number does not equal a bound
        that it must not reach."""
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        own = max(_num_decimals_of(bound.value) for bound in bounds)
        if not any(bound.is_strict for bound in bounds):
            return max(own, MOST_DECIMALS)
        longest = max(len(str(int(abs(bound.value)))) for bound in bounds)
        return max(own, MOST_DIGITS - longest, LEAST_DECIMALS)


def _negative(bound: Bound) -> Bound:
    return Bound(-bound.value, bound.is_strict)


def _end(low: Bound | None) -> Bound:
    """Returns an upper end for a range that only ``low`` bounds."""
    if low is None or low.value < END - 1:
        return Bound(END, is_strict=True)
    return Bound(Fraction(10 ** (len(str(int(low.value))) + 1)), is_strict=True)


def _first(low: Bound) -> int:
    """Returns the first integer above a lower bound."""
    whole = math.ceil(low.value)
    return whole + 1 if low.is_strict and whole == low.value else whole


def _multiple_of_both(first: Fraction, other: Fraction) -> Fraction:
    shared = math.lcm(first.denominator, other.denominator)
    return Fraction(math.lcm(int(first * shared), int(other * shared)), shared)


def common_multiple(multiples: Iterable[Fraction]) -> Fraction | None:
    found: Fraction | None = None
    for each in multiples:
        found = each if found is None else _multiple_of_both(found, each)
    return found


def _num_decimals_of(value: Fraction) -> int:
    """Returns the digits after the point; a fraction that came from a text has an end."""
    places, rest = 0, value.denominator
    for factor in (2, 5):
        count = 0
        while rest % factor == 0:
            rest, count = rest // factor, count + 1
        places = max(places, count)
    return places


def _digits_of(value: Fraction) -> str:
    """Returns the digits after the point of a number between 0 and 1, without zeros at its end."""
    places = _num_decimals_of(value)
    return str(int(value * 10**places)).rjust(places, "0") if places else ""


def text_of_fraction(value: Fraction) -> str:
    whole, rest = divmod(abs(value), 1)
    digits = _digits_of(rest)
    return f"{'-' if value < 0 else ''}{whole}{'.' if digits else ''}{digits}"


def _any_of(alternatives: Iterable[str]) -> str:
    found = [*dict.fromkeys(each for each in alternatives if each)]
    return "".join(found) if len(found) < 2 else f"(?:{'|'.join(found)})"


def _integers(low: int, high: int) -> str:
    """Returns an expression of the integers from ``low`` to ``high``; it is empty if there are none."""
    parts = []
    if low < 0 and low <= high:
        negative = _naturals(max(1, -high), -low)
        parts.append(f"-{negative}" if negative else "")
    parts.append(_naturals(max(low, 0), high))
    return _any_of(parts)


def _naturals(low: int, high: int) -> str:
    if low > high:
        return ""
    first, last = str(low), str(high)
    if len(first) == len(last):
        return _between(first, last)
    parts = [_between(first, "9" * len(first))]
    if len(last) - len(first) > 1:
        parts.append(f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}")
    parts.append(_between("1" + "0" * (len(last) - 1), last))
    return _any_of(parts)


def _between(first: str, last: str) -> str:
    """Returns an expression of the texts of digits from ``first`` to ``last``, which are equally long."""
    if not first:
        return ""
    if set(first) == {"0"} and set(last) == {"9"}:
        return f"[0-9]{{{len(first)}}}"
    if first[0] == last[0]:
        return first[0] + _between(first[1:], last[1:])
    rest = len(first) - 1
    start, end = int(first[0]), int(last[0])
    parts = []
    if set(first[1:]) - {"0"}:
        parts.append(first[0] + _between(first[1:], "9" * rest))
        start += 1
    if set(last[1:]) - {"9"}:
        parts.append(last[0] + _between("0" * rest, last[1:]))
        end -= 1
    if start <= end:
        parts.append(_digit(start, end) + (f"[0-9]{{{rest}}}" if rest else ""))
    return _any_of(parts)


def _digit(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


class _Digits(NamedTuple):
    """Holds texts of digits: those that match ``some``, and the empty one if ``or_none``."""

    some: str
    or_none: bool

    def after(self, digit: str) -> str:
        if not self.some:
            return digit if self.or_none else ""
        return f"{digit}(?:{self.some}){'?' if self.or_none else ''}"


def _decimals(low: Bound, high: Bound, places: int) -> str:
    """Returns an expression of the numbers between two bounds with up to this many digits after the point."""
    zero = Bound(Fraction(0))
    parts = []
    if low.value < 0:
        below = _negative(high) if high.value < 0 else Bound(Fraction(0), is_strict=True)
        negative = _positives(below, _negative(low), places)
        parts.append(f"-{negative}" if negative else "")
    if high.value >= 0:
        parts.append(_positives(zero if low.value < 0 else low, high, places))
    return _any_of(parts)


def _positives(low: Bound, high: Bound, places: int) -> str:
    first, last = int(low.value), int(high.value)
    above = Bound(low.value - first, low.is_strict)
    below = Bound(high.value - last, high.is_strict)
    if first == last:
        return _number(str(first), _between_decimals(above, below, places))
    inside = _naturals(first + 1, last - 1)
    return _any_of(
        [
            _number(str(first), _at_least(_digits_of(above.value), places, is_strict=above.is_strict)),
            _number(inside, _Digits(f"[0-9]{{1,{places}}}", or_none=True)) if inside else "",
            _number(str(last), _at_most(_digits_of(below.value), places, is_strict=below.is_strict)),
        ]
    )


def _number(whole: str, decimals: _Digits) -> str:
    if not decimals.some:
        return whole if decimals.or_none else ""
    return rf"{whole}(?:\.(?:{decimals.some})){'?' if decimals.or_none else ''}"


def _at_least(digits: str, places: int, *, is_strict: bool) -> _Digits:
    """Returns an expression of digits after a point that are not below ``digits``, which has no zeros at its
    end."""
    if not digits:
        if not is_strict:
            return _Digits(f"[0-9]{{1,{places}}}" if places else "", or_none=True)
        parts = [f"{'0' * zeros}[1-9][0-9]{{0,{places - zeros - 1}}}" for zeros in range(places)]
        return _Digits("|".join(parts), or_none=False)
    if not places:
        return _Digits("", or_none=False)
    digit = int(digits[0])
    parts = [_at_least(digits[1:], places - 1, is_strict=is_strict).after(digits[0])]
    if digit < 9:
        parts.append(f"{_digit(digit + 1, 9)}[0-9]{{0,{places - 1}}}")
    return _Digits("|".join(filter(None, parts)), or_none=False)


def _at_most(digits: str, places: int, *, is_strict: bool) -> _Digits:
    if not digits:
        if is_strict:
            return _Digits("", or_none=False)
        return _Digits(f"0{{1,{places}}}" if places else "", or_none=True)
    if not places:
        return _Digits("", or_none=True)
    digit = int(digits[0])
    parts = [_at_most(digits[1:], places - 1, is_strict=is_strict).after(digits[0])]
    if digit > 0:
        parts.append(f"{_digit(0, digit - 1)}[0-9]{{0,{places - 1}}}")
    return _Digits("|".join(filter(None, parts)), or_none=True)


def _between_decimals(low: Bound, high: Bound, places: int) -> _Digits:
    first, last = _digits_of(low.value), _digits_of(high.value)
    is_none_in = not first and not low.is_strict and (bool(last) or not high.is_strict)
    if not last:
        return _at_most("", places, is_strict=high.is_strict) if is_none_in else _Digits("", or_none=False)
    length = max(len(first), len(last))
    first, last = first.ljust(length, "0"), last.ljust(length, "0")
    shared = next((at for at in range(length) if first[at] != last[at]), length)
    if shared == length:  # Both texts are one number.
        same = _at_most("", places - length, is_strict=low.is_strict or high.is_strict).after(last)
        return _Digits(same, or_none=False)
    start, end = int(first[shared]), int(last[shared])
    room = places - shared - 1
    lower = _at_least(first[shared + 1 :].rstrip("0"), room, is_strict=low.is_strict)
    upper = _at_most(last[shared + 1 :].rstrip("0"), room, is_strict=high.is_strict)
    inner = f"{_digit(start + 1, end - 1)}[0-9]{{0,{room}}}" if start + 1 < end else ""
    options = [lower.after(str(start)), inner, upper.after(str(end))]
    # A text that ends within what both share is below ``last``, and reaches ``first`` if only zeros follow.
    some = "|".join(filter(None, options))
    prefix = first[:shared]
    written = f"{prefix}(?:{some})"
    if prefix and is_none_in:
        written = f"{written}|0{{1,{shared}}}"
    return _Digits(written, or_none=is_none_in)


def _without_zeros(number: int) -> int:
    while number and number % 10 == 0:
        number //= 10
    return number


def _multiples(multiple: Fraction, low: Bound, high: Bound, *, is_integer: bool) -> str:
    """Returns an expression of multiples: a few are written one by one; more are left to llguidance, if it
    counts them exactly."""
    first = _first(Bound(low.value / multiple, low.is_strict))
    last = -_first(_negative(Bound(high.value / multiple, high.is_strict)))
    if last - first < MOST_MULTIPLES:
        texts = [text_of_fraction(number * multiple) for number in range(first, last + 1)]
        return " | ".join(f'"{text}"' for text in texts)
    unit, places = float(multiple), 0
    while unit != int(unit) and places < MOST_DECIMALS:
        unit, places = unit * 10, places + 1
    if _without_zeros(int(unit)) > MOST_UNITS or Fraction(int(unit), 10**places) != multiple:
        raise ValueError(f"multiples of {text_of_fraction(multiple)[:40]} cannot be told from other numbers")
    bounds = {"minimum": first * multiple, "maximum": last * multiple}
    if any(abs(bound) >= END or len(text_of_fraction(bound)) > MOST_DIGITS for bound in bounds.values()):
        # Only the bound itself has that many digits, so that fewer are a narrowing, as there.
        most = Fraction(10 ** max(MOST_DIGITS - 1 - places, 1))
        bounds = {"minimum": max(bounds["minimum"], -most), "maximum": min(bounds["maximum"], most)}
    if bounds["minimum"] >= bounds["maximum"]:
        raise ValueError(f"multiples of {text_of_fraction(multiple)[:40]} cannot be counted so far from 0")
    written = {"type": "integer" if is_integer else "number", "multipleOf": float(multiple)}
    if is_integer:
        written["multipleOf"] = int(multiple)
    numbers = ", ".join(f'"{name}": {text_of_fraction(bound)}' for name, bound in bounds.items())
    return f"%json {json.dumps(written)[:-1]}, {numbers}}}"


def read_json(text: str) -> Any:
    """Reads a schema that is written out, each number with its text."""
    try:
        return json.loads(text, parse_float=read_float, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
