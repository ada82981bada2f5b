"""Names of metrics and events, and the event log.  Imports neither torch nor Lightning."""

from lightning_cann.metrics.events import EVENTS, EventLog, EventTail, Narrator, describe, read_events
from lightning_cann.metrics.names import METRICS, Metric, metric, metric_names

__all__ = [
    "EVENTS",
    "METRICS",
    "EventLog",
    "EventTail",
    "Metric",
    "Narrator",
    "describe",
    "metric",
    "metric_names",
    "read_events",
]
