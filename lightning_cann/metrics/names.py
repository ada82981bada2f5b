"""The one table of metric names.

Whatever emits a number (strategy, callbacks, report) takes its name from here, so loggers, dashboards and the
documentation cannot drift apart.  This module is a table only: it computes nothing and imports no torch.

>>> metric("ft_members").unit
'members'
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["METRICS", "Metric", "metric", "metric_names"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One row: what a metric is called and what its number means."""

    name: str
    """Name under which loggers see it."""
    kind: Literal["gauge", "counter"]
    """``gauge``: the latest value counts; ``counter``: only grows during a job."""
    unit: str
    """Unit of the number in words (``seconds``, ``steps``, ...)."""
    help: str
    """One sentence for people."""


METRICS: tuple[Metric, ...] = (
    Metric(name="ft_view", kind="gauge", unit="view number", help="Number of the installed view."),
    Metric(name="ft_members", kind="gauge", unit="members", help="Members that train in the installed view."),
    Metric(
        name="ft_recovery_latency_seconds",
        kind="gauge",
        unit="seconds",
        help="Time from the break of the last view until the next one was connected, on the rank that logs.",
    ),
    Metric(
        name="ft_steps_redone",
        kind="counter",
        unit="steps",
        help="Steps and control collectives that the rank that logs ran again in a newer view.",
    ),
    Metric(name="ft_failures", kind="counter", unit="failures", help="Members that failed since the job started."),
    Metric(name="ft_rejoins", kind="counter", unit="members", help="Replacements that joined since the job started."),
    Metric(
        name="ft_gradient_divergence",
        kind="gauge",
        unit="ratio",
        help="Largest relative deviation between members of a random projection of the weights; 0 when healthy.",
    ),
)

_BY_NAME = {row.name: row for row in METRICS}


def metric(name: str) -> Metric:
    """Return the row called ``name``.

    Raises:
        KeyError: No such metric; the message lists the names there are.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise KeyError(f"unknown metric {name!r}; the table has: {', '.join(metric_names())}") from None


def metric_names() -> Iterator[str]:
    """Iterate over all names, in table order."""
    return (row.name for row in METRICS)
