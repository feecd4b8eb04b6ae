"""Whose cached K/V a request may use: its tenant's, or what the operator lets tenants share."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxserve.config import PrefixCacheSection
from jaxserve.identity import CacheIdentity


class Namespaces:
    """Gives each request the identity of its K/V; which tenant asks is the server's word alone.

    A salt narrows inside the tenant's namespace, or the shared one: it opens no other.
    """

    def __init__(
        self,
        section: PrefixCacheSection,
        model: CacheIdentity,
        *,
        changing_ropes: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Args:
        model: all of an identity that is the model's; whose it is is filled in.
        changing_ropes: as in `ServedModel`.
        """
        self._is_on = section.enabled
        self._model = model
        self._changing_ropes = tuple(changing_ropes)
        self._shared: Mapping[str, str] = {
            tenant: name
            for name, tenants in section.shared_namespaces.items()
            for tenant in tenants
        }

    def find_identity(self, tenant: str, salt: str, *, prompt_len: int) -> CacheIdentity | None:
        """Returns what a request's K/V is kept and found under; None with the cache off.

        Args:
          salt: "" is none.
        """
        if not self._is_on:
            return None
        shared = self._shared.get(tenant)
        return dataclasses.replace(
            self._model,
            positions=self._model.positions + self._name_lengths(prompt_len),
            scope="tenant" if shared is None else "shared",
            owner=tenant if shared is None else shared,
            salt=salt or None,
        )

    def _name_lengths(self, prompt_len: int) -> str:
        """Returns what a prompt's length changes of its positions.

        Position p has the frequencies of length max(prompt length, p + 1). Up to the original
        length they are the same for all; beyond it longrope has one other set, dynamic one for each
        length.
        """
        names = ""
        for kind, original in self._changing_ropes:
            if prompt_len > original:
                names += " long" if kind == "longrope" else f" {prompt_len}"
            else:
                names += " short"
        return names
