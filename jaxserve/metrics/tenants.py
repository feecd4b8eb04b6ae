"""Tenants as a label: a bounded number of names, and never a text that a client sends."""

from collections.abc import Iterable
from typing import Final

MAX_NAMES: Final = 32
ANONYMOUS: Final = "anonymous"  # where no keys are asked for
OTHER: Final = "other"


class TenantLabels:
    """The first tenants that have a table in the configuration go by their names, the rest by one.

    A name that is taken stays, whatever is configured later: a counter never changes its label.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add_names(self, names: Iterable[str]) -> None:
        """Takes names in this order while there is room."""
        for name in names:
            if len(self._names) < MAX_NAMES:
                self._names.setdefault(name)

    def label(self, tenant: str) -> str:
        """Returns the label of a tenant; "" is who came without a key."""
        if not tenant:
            return ANONYMOUS
        return tenant if tenant in self._names else OTHER
