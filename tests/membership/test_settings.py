"""Settings of the coordinator: a wrong one is refused with its name, its value and the way out."""

from __future__ import annotations

import pytest

from lightning_cann.errors import ConfigurationError
from lightning_cann.membership.coordinator import CoordinatorSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", 0),
        ("min_members", 0),
        ("min_members", 5),
        ("max_failures", -1),
        ("lease_s", 0.0),
        ("on_rank_exception", "ignore"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}={value!r}"):
        CoordinatorSettings(**{"world_size": 4, name: value})


def test_limits_may_be_the_whole_world_or_none() -> None:
    settings = CoordinatorSettings(world_size=4, min_members=4, max_failures=None)
    assert settings.min_members == 4 and settings.max_failures is None
