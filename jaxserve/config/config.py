"""All sections of the configuration; each key says its meaning, its default and what is allowed.

The defaults equal `configs/cpu.toml`, where each number says where it was measured. Nothing of it
is changed after start-up.
"""

from jaxserve.config.kv import HostTierSection, KVSection, PrefixCacheSection
from jaxserve.config.limits import LimitsSection
from jaxserve.config.model import ModelSection, SamplingSection
from jaxserve.config.observing import LogSection, MeasureSection, MetricsSection, TracingSection
from jaxserve.config.runner import BucketsSection, RunnerSection
from jaxserve.config.scheduler import SchedulerSection
from jaxserve.config.section import Section
from jaxserve.config.server import AdminSection, ServerSection, TlsSection
from jaxserve.config.tenants import AuthSection, TenantsSection


class Config(Section):
    """All of it."""

    model: ModelSection = ModelSection()
    sampling: SamplingSection = SamplingSection()
    kv: KVSection = KVSection()
    prefix_cache: PrefixCacheSection = PrefixCacheSection()
    host_tier: HostTierSection = HostTierSection()
    scheduler: SchedulerSection = SchedulerSection()
    buckets: BucketsSection = BucketsSection()
    runner: RunnerSection = RunnerSection()
    limits: LimitsSection = LimitsSection()
    server: ServerSection = ServerSection()
    tls: TlsSection = TlsSection()
    auth: AuthSection = AuthSection()
    tenants: TenantsSection = TenantsSection()
    admin: AdminSection = AdminSection()
    metrics: MetricsSection = MetricsSection()
    measure: MeasureSection = MeasureSection()
    tracing: TracingSection = TracingSection()
    log: LogSection = LogSection()
