"""`[kv]`, `[prefix_cache]` and `[host_tier]`: the pages and what is kept of them."""

from typing import Annotated, Literal

import pydantic

from jaxserve.config.section import GIB, Section
from jaxserve.config.tenants import check_tenant_name


class KVSection(Section):
    """The paged KV pool."""

    page_size: int = pydantic.Field(16, ge=1, le=1024, description="Tokens of a page.")
    dtype: Literal["auto", "float32", "bfloat16", "int8", "float8_e4m3fn"] = pydantic.Field(
        "auto",
        description="auto: the model's dtype. int8, float8_e4m3fn: a byte for each number, and a "
        "float32 scale for each token's K, and V, in each KV head.",
    )
    pool_bytes: int | None = pydantic.Field(
        None, ge=1, description="Bytes of the pool. Unset: 1 GiB on CPU, what is free elsewhere."
    )
    num_pages: int | None = pydantic.Field(
        None, ge=2, description="Pages of the pool, page 0 (padding) among them; over pool_bytes."
    )
    reserve: Literal["on_demand", "max_length"] = pydantic.Field(
        "on_demand",
        description="When a sequence takes its pages: as it grows, or all at admission (ablation).",
    )


def _check_shared_namespaces(shared: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    listed = [tenant for tenants in shared.values() for tenant in tenants]
    for name in (*shared, *listed):
        check_tenant_name(name)
    twice = sorted({tenant for tenant in listed if listed.count(tenant) > 1})
    if twice:
        raise ValueError(f"the tenant {twice[0]} is listed twice; a tenant has one namespace")
    return shared


class PrefixCacheSection(Section):
    """What is kept of computed prompts for later requests (docs/prefix-cache.md)."""

    enabled: bool = pydantic.Field(
        True, description="Keep full KV pages while there is room, and reuse them."
    )
    shared_namespaces: Annotated[
        dict[str, tuple[str, ...]], pydantic.AfterValidator(_check_shared_namespaces)
    ] = pydantic.Field(
        {},
        description="Tenants that share what is kept, by a name for it. They can tell by the time "
        "to the first token what the others ask. All other tenants share nothing.",
    )


class HostTierSection(Section):
    """KV pages in host memory: what the prefix cache drops from the pool, as long as there is room
    (docs/prefix-cache.md)."""

    enabled: bool = pydantic.Field(
        False,
        description="Copy pages that the prefix cache would drop to host memory, and back where "
        "that takes less time than to compute them. Needs prefix_cache.enabled.",
    )
    max_bytes: int = pydantic.Field(
        1 * GIB, ge=1, description="Bytes of those pages; what is worth least goes first."
    )
