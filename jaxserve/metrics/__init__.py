"""What one engine counts, and the names under which it is read. docs/metrics.md is the table."""

from jaxserve.metrics.labels import error_label, finish_labels, refusal_labels
from jaxserve.metrics.registry import Metrics
from jaxserve.metrics.view import MetricsView

__all__ = ["Metrics", "MetricsView", "error_label", "finish_labels", "refusal_labels"]
