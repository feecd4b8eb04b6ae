"""Typed reads of a Hugging Face config.json, with a family's defaults."""

from collections.abc import Mapping

from jaxserve.errors import CheckpointError

MAX_NUMBER = 1e300


class HfSettings:
    """What config.json says, or else the family's default.

    null is the default too, except in the reads called `optional_`, where it is a value: no window
    is not the same as the default window.
    """

    def __init__(
        self, given: Mapping[str, object], defaults: Mapping[str, object], where: str
    ) -> None:
        self.given, self._defaults, self.where = given, defaults, where

    def integer(self, name: str) -> int:
        value = self._get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self.wrong(name, value, "a whole number")

    def number(self, name: str) -> float:
        value = self._get(name)
        if is_number(value):
            return float(str(value))
        raise self.wrong(name, value, "a number")

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if isinstance(value, bool):
            return value
        raise self.wrong(name, value, "true or false")

    def text(self, name: str) -> str:
        value = self._get(name)
        if isinstance(value, str):
            return value
        raise self.wrong(name, value, "a text")

    def optional_integer(self, name: str) -> int | None:
        return None if self._is_none(name) else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        return None if self._is_none(name) else self.number(name)

    def group(self, name: str) -> dict[str, object]:
        """Returns an object, empty where there is none."""
        value = self.given.get(name)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        raise self.wrong(name, value, "an object")

    def integers(self, name: str) -> list[int] | None:
        value = self.given.get(name)
        if value is None:
            return None
        if isinstance(value, list) and all(isinstance(entry, int) for entry in value):
            return value
        raise self.wrong(name, value, "a list of whole numbers")

    def texts(self, name: str) -> list[str] | None:
        value = self.given.get(name)
        if value is None:
            return None
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            return value
        raise self.wrong(name, value, "a list of texts")

    def wrong(self, name: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name} is {value!r:.200}, but must be {wanted}")

    def _is_none(self, name: str) -> bool:
        return self.given.get(name, self._defaults.get(name)) is None

    def _get(self, name: str) -> object:
        value = self.given.get(name)
        if value is None:
            value = self._defaults.get(name)
        if value is None:
            raise CheckpointError(f"{self.where} lacks {name}")
        return value


def is_number(value: object) -> bool:
    """Returns whether it is a number that a float can hold; infinities and NaN are."""
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < MAX_NUMBER)
