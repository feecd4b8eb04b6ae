"""Prompt classes as they are written on the command line."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from jaxserve.errors import ConfigError
from jaxserve.measure.limits import parse_limit
from jaxserve.measure.workload.lengths import describe, parse_lengths
from jaxserve.measure.workload.make import PrefixGroups, PromptClass
from jaxserve.measure.workload.values import MAX_COUNT, MAX_SECONDS, did_you_mean

# Keys of a class, and the options that set them for all.
OPTIONS: Final[Mapping[str, str]] = {
    "weight": "",
    "prompt": "--prompt-tokens",
    "output": "--output-tokens",
    "prefix_groups": "--prefix-groups",
    "prefix_tokens": "--prefix-tokens",
    "zipf": "--zipf",
    "deadline": "--deadline",
    "priority": "--priority",
}
KEYS: Final = tuple(OPTIONS)
DEFAULTS: Final = {"weight": "1", "prompt": "128", "output": "64", "zipf": "0", "priority": "0"}


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Classes:
    """The classes, what the header says of them, and what they are promised."""

    classes: Sequence[PromptClass]
    parameters: Mapping[str, object]
    limits: Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ClassWords:
    """What is set of a class, as it is written.

    Attributes:
      name: "" is what the options set for all.
      words: by key.
      limits: as `ttft=0.5`.
    """

    name: str
    words: Mapping[str, str]
    limits: tuple[str, ...] = ()

    @classmethod
    def of_options(cls, options: argparse.Namespace) -> "ClassWords":
        names = {key: option[2:].replace("-", "_") for key, option in OPTIONS.items() if option}
        given = {key: getattr(options, name) for key, name in names.items()}
        return cls(name="", words={key: word for key, word in given.items() if word is not None})

    def place(self, key: str) -> str:
        """Returns what a message calls the key."""
        if key in self.words and self.name:
            return f"--class {self.name}: {key}"
        return OPTIONS[key]


def read_classes(texts: Sequence[str], common: ClassWords) -> Classes:
    """Returns the classes; without one, there is the one that the options set.

    Raises:
      ConfigError: a class is none, or a value will not do.
      WorkloadError: a file of lengths cannot be read.
    """
    found = [_parse_class(text) for text in texts] or [common]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--class {name} is there twice; leave one out")
    classes, parameters = [], {}
    for one in found:
        merged = dataclasses.replace(one, words={**DEFAULTS, **common.words, **one.words})
        given = dataclasses.replace(one, words={**one.words})
        classes.append(_build_class(merged, given))
        parameters[one.name] = _describe(merged)
    limits = {one.name: one.limits for one in found if one.limits}
    return Classes(classes=classes, parameters=parameters, limits=limits)


def _parse_class(text: str) -> ClassWords:
    name, colon, rest = text.partition(":")
    if not name.strip() or "=" in name:
        raise ConfigError(f"--class {text!r} is not NAME:KEY=VALUE,… such as chat:weight=3")
    words: dict[str, str] = {}
    limits = []
    for part in rest.split(",") if colon and rest else ():
        key, equals, value = part.partition("=")
        if key in words:
            raise ConfigError(f"--class {name}: {key} is there twice; leave one out")
        if not equals or not value:
            raise ConfigError(f"--class {name}: {part!r} is not KEY=VALUE, such as weight=3")
        if key in KEYS:
            words[key] = value
        elif key.startswith(("ttft", "itl", "gap", "tpot", "e2e")):
            limits.append(parse_limit(part).text)
        else:
            raise ConfigError(f"--class {name}: {key} is not known{did_you_mean(key, KEYS)}")
    return ClassWords(name=name, words=words, limits=tuple(limits))


def _build_class(merged: ClassWords, given: ClassWords) -> PromptClass:
    words = merged.words
    deadline_s = None
    if "deadline" in words:
        deadline_s = _number(merged, given, "deadline", low=1e-6, high=MAX_SECONDS)
    return PromptClass(
        name=merged.name,
        weight=_number(merged, given, "weight", low=1e-6, high=1e6),
        prompt=parse_lengths(words["prompt"], given.place("prompt")),
        output=parse_lengths(words["output"], given.place("output")),
        prefix=_build_prefix(merged, given),
        deadline_s=deadline_s,
        priority=_whole(merged, given, "priority", low=-(1 << 31)),
    )


def _build_prefix(merged: ClassWords, given: ClassWords) -> PrefixGroups | None:
    words = merged.words
    has = [key for key in ("prefix_groups", "prefix_tokens") if key in words]
    if not has:
        if words["zipf"] != DEFAULTS["zipf"]:
            raise ConfigError(f"{given.place('zipf')} is of groups; give --prefix-groups too")
        return None
    if len(has) == 1:
        raise ConfigError("--prefix-groups and --prefix-tokens go together; give both")
    return PrefixGroups(
        num_groups=_whole(merged, given, "prefix_groups", low=1, high=10**6),
        num_tokens=_whole(merged, given, "prefix_tokens", low=1),
        zipf=_number(merged, given, "zipf", low=0, high=10),
    )


def _number(merged: ClassWords, given: ClassWords, key: str, *, low: float, high: float) -> float:
    word = merged.words[key]
    try:
        value = float(word)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ConfigError(
            f"{given.place(key)} is {word!r}, but must be a number from {low:g} to {high:g}"
        )
    return value


def _whole(
    merged: ClassWords, given: ClassWords, key: str, *, low: int, high: int = MAX_COUNT
) -> int:
    word = merged.words[key]
    try:
        value = int(word)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ConfigError(
            f"{given.place(key)} is {word!r}, but must be a whole number from {low} to {high}"
        )
    return value


def _describe(merged: ClassWords) -> dict[str, object]:
    found: dict[str, object] = dict(merged.words)
    for key in ("prompt", "output"):
        text = merged.words[key]
        found[key] = describe(parse_lengths(text, key), text)
    return found
