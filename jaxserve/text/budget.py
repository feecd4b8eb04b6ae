# ruff: noqa: ANN401  (a template's values are of any type)
"""What a template may spend: steps of work and characters of text."""

import re
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import jinja2
import jinja2.utils

MAX_WIDTH = 10_000
ITEMS_PER_STEP = 16
# What these cost beside an empty loop round: about the ratio of their times.
CALL_STEPS, FILTER_STEPS, LOOKUP_STEPS = 8, 4, 4
_WIDE_FORMAT = re.compile(r"\d{5,}|[:%][^{}%]*[{*]")
_WIDENING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


class TemplateLimitError(jinja2.TemplateError):
    """A template spent its budget."""


class Budget:
    """What one rendering may still spend."""

    def __init__(self, *, steps: int, chars: int) -> None:
        self._steps, self._chars = steps, chars
        self._max_steps, self._max_chars = steps, chars

    def spend(self, steps: int, chars: int = 0) -> None:
        self._steps -= steps
        self._chars -= chars
        if self._steps < 0:
            raise TemplateLimitError(f"it does more than {self._max_steps} steps of work")
        if self._chars < 0:
            raise TemplateLimitError(f"it makes more than {self._max_chars} characters of text")

    def spend_on(self, value: object) -> None:
        """Pay for turning a value into text: a step for each item at any depth, and its characters.

        A list that holds one list many times is paid for as often as it would be written.
        """
        stack = [value]
        while stack:
            item = stack.pop()
            self.spend(1, len(item) if isinstance(item, str) else 0)
            if isinstance(item, Mapping):
                stack.extend((*item.keys(), *item.values()))
            elif isinstance(item, list | tuple | set | frozenset):
                self.spend(len(item))
                stack.extend(item)
            elif isinstance(item, jinja2.utils.Namespace):
                raise jinja2.TemplateError("a namespace cannot be written as text")

    def spend_on_size(self, value: object) -> None:
        """Pay for walking over a value once."""
        if isinstance(value, str):
            self.spend(1, len(value))
        elif isinstance(value, Sized):
            self.spend(1 + len(value) // ITEMS_PER_STEP)
        else:
            self.spend(1)


def as_sized(value: Any) -> Any:
    """Returns a generator's items as a list, so that they can be counted."""
    return list(value) if isinstance(value, Iterator) else value


def check_string_method(budget: Budget, receiver: str, name: str, args: list[Any]) -> None:
    """Refuse or pay for string methods whose result can be far longer than their text."""
    budget.spend_on_size(receiver)
    if name in _WIDENING_METHODS:
        for number in args:
            check_width(name, number)
        budget.spend(0, len(receiver) * (MAX_WIDTH if name == "expandtabs" and args else 8))
    elif name == "replace" and len(args) >= 2:
        budget.spend(0, receiver.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args and isinstance(args[0], Sized):
        budget.spend(0, len(receiver) * len(args[0]))
        budget.spend_on(args[0])
    elif name in ("encode", "translate"):  # the methods of bytes would need all this once more
        raise jinja2.TemplateError(f"str.{name} is not supported in templates")


def check_width(name: str, value: object) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_WIDTH:
        raise TemplateLimitError(f"{name} is given {value}, more than {MAX_WIDTH}")


def check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError(f"the format {text[:40]!r} has a width that is too large to allow")


def check_product(budget: Budget, left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, Sized) and isinstance(times, int):
            budget.spend(0, len(value) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())


def check_bits(bits: int) -> None:
    if bits > 4096:
        raise TemplateLimitError("it computes with numbers of more than 4096 bits")
