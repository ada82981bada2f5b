"""All settings of fault-tolerant training, in one place, with their defaults; checked when they are made."""

from __future__ import annotations

import dataclasses
import os

import torch

from lightning_cann import environment as env
from lightning_cann.collectives.backend import get_backend
from lightning_cann.collectives.view_group import GroupSettings
from lightning_cann.errors import ConfigurationError
from lightning_cann.membership.settings import CoordinatorSettings, check_numbers

__all__ = ["FaultToleranceSettings"]

DEFAULT_MAX_FAILURES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultToleranceSettings:
    """Settings of the strategy.  All times in seconds."""

    max_failures: int | str | None = "env"
    """Logical ranks that may be without a member at one time; None: no limit.  ``"env"`` (not given): HCCL_FT_MAX_FAILURES,
    else 3."""
    min_members: int = 1
    """The job stops when fewer members are left."""
    lease_s: float = 2.0
    """A member that is silent for so long is excluded (frozen process, cut network)."""
    replace: bool = True
    """Whether the agent starts a replacement for a rank that died."""
    max_restarts: int = 10
    """Replacements of one rank in a row that end before they train; then the rank is given up."""
    on_rank_exception: str = "fail"
    """What an exception of the user's code on one rank does: ``"fail"`` ends the job, ``"replace"`` replaces the rank."""
    start_method: str = "popen"
    """``"popen"`` re-runs the script for each rank, ``"spawn"`` spawns interpreters that run the trainer call."""
    process_group_backend: str | None = None
    """``"gloo"``, ``"nccl"``, ``"hccl"``; None: by the device."""
    find_unused_parameters: bool = False
    """As in DDP: some parameters may receive no gradient."""
    bucket_cap_mb: float | None = None
    """As in DDP (MiB); None: 1 for the first bucket, 25 for the others."""
    broadcast_buffers: bool = True
    """As in DDP: module buffers are those of the lowest live rank in each forward."""
    divergence_every_n_steps: int = 50
    """How often members compare a random projection of their weights (``ft_gradient_divergence``); 0: never."""
    collective_timeout_s: float = 600.0
    """A collective that takes longer breaks the view; with the same members it is redone."""
    start_timeout_s: float = 600.0
    """How long the first view waits for all ranks before it starts with those that are there."""
    join_timeout_s: float = 120.0
    """How long members wait for a newcomer to take its state."""
    event_log: str | None = None
    """Path of the event log (JSONL); None: no file."""
    audit: bool = False
    """Keep which batches were consumed in which epoch (``data_audit()``)."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.start_method not in ("popen", "spawn"):
            raise ConfigurationError(
                f"start_method={self.start_method!r} must be 'popen' (re-run the script) or 'spawn' (for notebooks)."
            )
        if self.divergence_every_n_steps < 0:
            raise ConfigurationError(
                f"divergence_every_n_steps={self.divergence_every_n_steps} must be 0 (never) or a number of steps."
            )
        if isinstance(self.max_failures, str) and self.max_failures != "env":
            raise ConfigurationError(f"max_failures={self.max_failures!r} must be a number, or None for no limit.")
        for name in ("collective_timeout_s", "start_timeout_s", "join_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be a positive number of seconds.")
        if self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts={self.max_restarts} must be 0 (never restart) or more.")
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise ConfigurationError(
                f"bucket_cap_mb={self.bucket_cap_mb} must be a positive number of MiB, or None for DDP's."
            )
        if self.process_group_backend is not None:
            get_backend(self.process_group_backend, torch.device("cpu"))  # knows the names
        self.coordinator_settings(max(1, self.min_members))  # what it checks is wrong here already

    def resolved_max_failures(self) -> int | None:
        """The argument, else the environment, else the default."""
        if self.max_failures == "env":
            return env.read_int(env.MAX_FAILURES, DEFAULT_MAX_FAILURES)
        assert not isinstance(self.max_failures, str)
        return self.max_failures

    def coordinator_settings(self, world_size: int) -> CoordinatorSettings:
        """What the coordinator of a job of ``world_size`` ranks needs.  Raises ConfigurationError."""
        return CoordinatorSettings(
            world_size=world_size,
            min_members=self.min_members,
            max_failures=self.resolved_max_failures(),
            lease_s=self.lease_s,
            start_timeout_s=self.start_timeout_s,
            join_timeout_s=self.join_timeout_s,
            on_rank_exception=self.on_rank_exception,
        )

    def group_settings(self) -> GroupSettings:
        """What a member's collectives need."""
        return GroupSettings(
            backend=self.process_group_backend, collective_timeout_s=self.collective_timeout_s, lease_s=self.lease_s
        )

    @staticmethod
    def enabled() -> bool:
        """False if HCCL_FT_ENABLE=0: recovery is off and the strategy behaves as DDP."""
        return env.read_bool(env.ENABLE, True)

    def event_log_path(self) -> str | None:
        return self.event_log or os.environ.get(env.EVENTS)
