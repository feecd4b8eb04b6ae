"""The configuration: one frozen pydantic model, read from TOML, then environment, then flags."""

from jaxserve.config.config import Config
from jaxserve.config.kv import HostTierSection, KVSection, PrefixCacheSection
from jaxserve.config.limits import LimitsSection
from jaxserve.config.load import (
    Origin,
    Resolved,
    default_cache_dir,
    find_problems,
    load_config,
    read_cxx,
    resolve_config,
)
from jaxserve.config.model import ModelSection, SamplingSection
from jaxserve.config.observing import LogSection, MeasureSection, MetricsSection, TracingSection
from jaxserve.config.runner import BucketsSection, RunnerSection
from jaxserve.config.scheduler import SchedulerSection
from jaxserve.config.section import GIB, MIB, Section
from jaxserve.config.server import AdminSection, ServerSection, TlsSection, is_loopback
from jaxserve.config.tenants import AuthSection, TenantLimits, TenantsSection, check_tenant_name

__all__ = [
    "GIB",
    "MIB",
    "AdminSection",
    "AuthSection",
    "BucketsSection",
    "Config",
    "HostTierSection",
    "KVSection",
    "LimitsSection",
    "LogSection",
    "MeasureSection",
    "MetricsSection",
    "ModelSection",
    "Origin",
    "PrefixCacheSection",
    "Resolved",
    "RunnerSection",
    "SamplingSection",
    "SchedulerSection",
    "Section",
    "ServerSection",
    "TenantLimits",
    "TenantsSection",
    "TlsSection",
    "TracingSection",
    "check_tenant_name",
    "default_cache_dir",
    "find_problems",
    "is_loopback",
    "load_config",
    "read_cxx",
    "resolve_config",
]
