"""Workloads: which requests come when, as files with a hash of the load that they mean."""

from jaxserve.measure.workload.entry import (
    Header,
    Prompt,
    Recipe,
    Workload,
    WorkloadEntry,
)
from jaxserve.measure.workload.file import (
    OpenedWorkload,
    WorkloadEnd,
    load_workload,
    open_workload,
    save_workload,
    write_workload,
)
from jaxserve.measure.workload.prompts import materialize

__all__ = [
    "Header",
    "OpenedWorkload",
    "Prompt",
    "Recipe",
    "Workload",
    "WorkloadEnd",
    "WorkloadEntry",
    "load_workload",
    "materialize",
    "open_workload",
    "save_workload",
    "write_workload",
]
