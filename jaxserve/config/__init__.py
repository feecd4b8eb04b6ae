"""The configuration: one frozen pydantic model, read from TOML, then environment, then flags."""

from jaxserve.config.load import (
    Origin,
    Resolved,
    default_cache_dir,
    find_problems,
    load_config,
    resolve_config,
)
from jaxserve.config.sections import (
    GIB,
    MIB,
    BucketsSection,
    Config,
    KVSection,
    LimitsSection,
    LogSection,
    MeasureSection,
    MetricsSection,
    ModelSection,
    RunnerSection,
    SchedulerSection,
    Section,
    ServerSection,
)

__all__ = [
    "GIB",
    "MIB",
    "BucketsSection",
    "Config",
    "KVSection",
    "LimitsSection",
    "LogSection",
    "MeasureSection",
    "MetricsSection",
    "ModelSection",
    "Origin",
    "Resolved",
    "RunnerSection",
    "SchedulerSection",
    "Section",
    "ServerSection",
    "default_cache_dir",
    "find_problems",
    "load_config",
    "resolve_config",
]
