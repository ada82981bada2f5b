"""Every test leaves the process as it found it; under CI a skipped test is a failed one."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import psutil
import pytest

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

# The fork server and its helper live as long as the test process, by design of multiprocessing.
_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "wandb-core", "gpu_stats")


def _children() -> set[int]:
    found = set()
    for child in psutil.Process().children(recursive=False):
        try:
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not any(name in command for name in _HELPERS):
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """No changed environment, no running thread of ours, no child process, no process group."""
    environment, threads, children = dict(os.environ), set(threading.enumerate()), _children()
    yield
    changed = {k for k in set(environment) | set(os.environ) if environment.get(k) != os.environ.get(k)}
    changed -= {"PYTEST_CURRENT_TEST", "WANDB_SERVICE", "_WANDB_STARTUP_DEBUG", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"}
    # set by imports, once
    changed = {k for k in changed if not k.startswith(("KMP_", "TORCHINDUCTOR_", "WANDB_", "PYTORCH_NVML"))}
    assert not changed, f"the test changed the environment: {sorted(changed)}"
    ours = [t for t in threading.enumerate() if t not in threads and t.name.startswith("cann-")]
    for thread in ours:
        thread.join(timeout=10)
    assert not [t.name for t in ours if t.is_alive()], "the test left threads running"
    gc.collect()  # DataLoader workers end with their iterator, which a traceback may still hold
    left = [psutil.Process(pid) for pid in _children() - children if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive, f"the test left child processes running: {alive}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under CI, where nothing may be: {report.longrepr}"
