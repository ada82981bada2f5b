"""Most tests of this folder only compare results that were computed once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def imports_are_not_collected_again() -> Iterator[None]:
    """The garbage collection after each test would look at all that torch and Lightning imported: up to a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
