"""`[auth]` and `[tenants]`: who may call, and what each may use."""

import re
from pathlib import Path
from typing import Annotated

import pydantic

from jaxserve.config.section import Section

TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
RESERVED_TENANTS = ("anonymous", "other")


class AuthSection(Section):
    """Who may call (docs/security.md)."""

    keys_file: Path | None = pydantic.Field(
        None,
        description="Keys and their tenants, from `jaxserve keys`. Unset: anyone who can connect.",
    )
    allow_open: bool = pydantic.Field(
        False,
        description="Listen beyond this machine though neither keys nor client certificates are "
        "asked for.",
    )
    reload_interval_s: float = pydantic.Field(
        30.0,
        ge=0,
        description="Between looks at whether the files of keys and certificates changed; 0 is "
        "never: SIGHUP and ReloadCredentials remain.",
    )


def check_tenant_name(name: str) -> None:
    """Raises ValueError for a name that no key and no table may have."""
    if not TENANT_NAME.fullmatch(name):
        raise ValueError(
            f"the tenant {name!r} must be 1 to 64 ASCII letters, digits, dots, dashes and "
            "underscores, beginning with a letter or digit"
        )
    if name in RESERVED_TENANTS:
        raise ValueError(f"{name} is a word of the metrics; call the tenant something else")


class TenantLimits(Section):
    """What a tenant may use; unset is no limit of its own."""

    requests_per_minute: int | None = pydantic.Field(
        None, ge=1, description="Requests; as many may come at once after a quiet minute."
    )
    tokens_per_minute: int | None = pydantic.Field(
        None,
        ge=1,
        description="Prompt tokens, charged at submit, and output tokens, charged at the end.",
    )
    max_concurrent_requests: int | None = pydantic.Field(
        None, ge=1, description="Requests in the engine at once, waiting or running."
    )
    queue_share: float = pydantic.Field(
        1.0, gt=0, le=1, description="Share of the queue that its waiting requests may fill."
    )
    max_context_tokens: int | None = pydantic.Field(
        None, ge=2, description="Longest prompt + output, where the model allows more."
    )
    max_priority: int | None = pydantic.Field(
        None, ge=-(1 << 31), le=(1 << 31) - 1, description="Highest priority it may ask for."
    )
    weight: float = pydantic.Field(
        1.0,
        gt=0,
        le=1e6,
        description="With scheduler.policy fair, its share of the machine, by that of others.",
    )


def _check_tenant_names(named: dict[str, TenantLimits]) -> dict[str, TenantLimits]:
    for name in named:
        check_tenant_name(name)
    return named


class TenantsSection(Section):
    """Limits of the tenants that keys belong to (docs/security.md); read again with the keys."""

    default: TenantLimits = pydantic.Field(
        TenantLimits(), description="Of every tenant without a table of its own."
    )
    named: Annotated[dict[str, TenantLimits], pydantic.AfterValidator(_check_tenant_names)] = (
        pydantic.Field(
            {}, description="Of one tenant, by its name; nothing is taken over from default."
        )
    )

    def limits_of(self, tenant: str) -> TenantLimits:
        return self.named.get(tenant, self.default)
