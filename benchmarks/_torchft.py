"""torchft on the model and the kill of :mod:`.recovery`, if it can be imported (it is no dependency of ours).

One job per kill: a LighthouseServer with its own defaults, ``W`` replica groups of one process, gloo.  A survivor has
recovered when it commits a step after the kill.  A survivor that ends, or commits nothing within PATIENCE_S, is a failure.

    python -m benchmarks._torchft ADDRESS MODEL FOLDER RANK        what runs in a replica
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._common import median, progress

__all__ = ["available", "measure_torchft"]

WARM_UP = 20  # steps that all replicas take together before the kill
PATIENCE_S = 90.0


def available() -> bool:
    return importlib.util.find_spec("torchft") is not None


def measure_torchft(model: str, world_size: int, kills: int, seed: int) -> dict[str, Any]:
    """Recovery of each kill in seconds, and how many jobs failed."""
    from torchft.coordination import LighthouseServer

    draw, found, failed = random.Random(seed), [], 0
    for number in range(kills):
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
        try:
            figures = _one_kill(lighthouse.address(), model, world_size, number % world_size, draw)
        finally:
            lighthouse.shutdown()
        failed += figures is None
        found += [] if figures is None else [figures]
        progress(f"torchft, {model}, SIGKILL {number + 1} of {kills}: {figures or 'the survivors did not go on'}")
    return {"found": found, "failed": failed}


def _one_kill(address: str, model: str, world_size: int, victim: int, draw: random.Random) -> dict[str, float] | None:
    with tempfile.TemporaryDirectory(prefix="cann-bench-") as folder, contextlib.ExitStack() as stack:
        replicas = [_start(address, model, folder, rank, stack) for rank in range(world_size)]
        if not _until(lambda: all(len(_stamps(folder, r, world_size)) >= WARM_UP for r in range(world_size)), replicas, -1):
            return None
        steps = _stamps(folder, victim, world_size)
        step = median(b - a for a, b in itertools.pairwise(steps[-10:]))
        _until(lambda: False, replicas, -1, limit_s=draw.random() * step)  # anywhere in a step
        killed_at = time.monotonic()
        replicas[victim].kill()
        others = [r for r in range(world_size) if r != victim]

        def after(rank: int) -> list[float]:  # without the victim: what was under way may still commit with it
            return [t for t, n in _rows(folder, rank) if t > killed_at and n < world_size]

        if not _until(lambda: all(after(r) for r in others), replicas, victim):
            return None
        return {"step": step, "recovery": max(after(r)[0] for r in others) - killed_at}


def _start(address: str, model: str, folder: str, rank: int, stack: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHFT_LIGHTHOUSE": address}
    log = stack.enter_context(Path(folder, f"{rank}.log").open("wb"))  # noqa: SIM115
    command = [sys.executable, "-m", "benchmarks._torchft", address, model, folder, str(rank)]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    stack.callback(end)
    return process


def _stamps(folder: str, rank: int, participants: int = 0) -> list[float]:
    """Times of the committed steps of a replica, of those with so many participants."""
    return [t for t, n in _rows(folder, rank) if n >= participants]


def _rows(folder: str, rank: int) -> list[tuple[float, int]]:
    path = Path(folder, f"{rank}.steps")
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(float(row[0]), int(row[1])) for row in rows if len(row) == 2]


def _until(done: Any, replicas: list[Any], dead: int, limit_s: float = PATIENCE_S) -> bool:
    """Looks every 5 ms; False when a living replica ended, or the time is over."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if done():
            return True
        if any(p.poll() is not None for r, p in enumerate(replicas) if r != dead):
            return False
        time.sleep(0.005)
    return False


def replica(address: str, model: str, folder: str, rank: int) -> None:
    """Trains until it is killed; a line "time participants" per committed step."""
    import torch
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from benchmarks._ranks import MODELS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, sample, batch = MODELS[model]
    module = make()
    inner = torch.optim.AdamW(module.parameters(), lr=1e-4)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=lambda state: (module.load_state_dict(state["m"]), inner.load_state_dict(state["o"])),
        state_dict=lambda: {"m": module.state_dict(), "o": inner.state_dict()},
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"bench-{rank}-",
        hostname="127.0.0.1",
    )
    wrapped, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, inner)
    data = torch.stack([sample() for _ in range(batch)])
    with open(os.path.join(folder, f"{rank}.steps"), "a", buffering=1) as steps:
        while True:
            before = manager.current_step()
            optimizer.zero_grad()
            wrapped(data).pow(2).mean().backward()
            optimizer.step()
            if manager.current_step() > before:
                steps.write(f"{time.monotonic()} {manager.num_participants()}\n")


if __name__ == "__main__":
    replica(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
