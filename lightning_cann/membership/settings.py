"""What the coordinator must know of a job; checked when it is made."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_cann.errors import ConfigurationError

__all__ = ["CoordinatorSettings", "check_numbers"]


def check_numbers(settings: Any) -> None:
    """Raises ConfigurationError for a field that holds no number where its default is one (YAML and shells give strings)."""
    for field in dataclasses.fields(settings):
        value, expected = getattr(settings, field.name), field.default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(expected, (int, float)) and not isinstance(expected, bool) and value is not None and not is_number:
            raise ConfigurationError(f"{field.name}={value!r} must be a number, not {type(value).__name__}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """What the coordinator must know of the job."""

    world_size: int
    """Number of logical ranks."""
    min_members: int = 1
    """Fewer members than this: the job stops."""
    max_failures: int | None = 3
    """More logical ranks than this without a member at one time: the job stops.  None: no limit."""
    lease_s: float = 2.0
    """A member that is silent for so long (seconds) is excluded."""
    start_timeout_s: float = 600.0
    """How long the first view waits for all ranks (seconds) before it starts with those that are there."""
    join_timeout_s: float = 120.0
    """How long members wait for a newcomer to take its state (seconds)."""
    on_rank_exception: str = "fail"
    """``"fail"``: an exception on one rank ends the job; ``"replace"``: that rank is replaced."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.world_size < 1:
            raise ConfigurationError(f"world_size={self.world_size} must be at least 1.")
        if not 1 <= self.min_members <= self.world_size:
            raise ConfigurationError(
                f"min_members={self.min_members} must lie between 1 and the number of ranks, {self.world_size}: "
                "lower it, or start more ranks."
            )
        if self.max_failures is not None and self.max_failures < 0:
            raise ConfigurationError(f"max_failures={self.max_failures} must be 0 or more, or None for no limit.")
        if self.lease_s <= 0:
            raise ConfigurationError(f"lease_s={self.lease_s} must be a positive number of seconds.")
        if self.on_rank_exception not in ("fail", "replace"):
            raise ConfigurationError(f"on_rank_exception={self.on_rank_exception!r} must be 'fail' or 'replace'.")
