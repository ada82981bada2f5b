"""DataLoader workers die with a rank that is killed (else they keep its sockets open)."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The worker blocks in the dataset: torch's own watchdog (it polls between batches) never runs.
RANK = """
import os, sys, threading
from torch.utils.data import DataLoader, Dataset
from lightning_cann.data import ElasticLoader

class Blocks(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        print(os.getpid(), flush=True)
        threading.Event().wait()

if __name__ == "__main__":
    user = DataLoader(Blocks(), num_workers=1, multiprocessing_context=sys.argv[1])
    next(iter(ElasticLoader(user, rank=0, world_size=1)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_dies_with_its_killed_parent(tmp_path: Path, method: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, env=env, text=True) as rank:
        assert rank.stdout is not None
        try:
            worker = int(rank.stdout.readline())
            assert worker != rank.pid
            pidfd = os.pidfd_open(worker)
        finally:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
        try:
            ended, _, _ = select.select([pidfd], [], [], 3.0)  # readable when the process has ended
            if not ended:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            assert ended, f"worker {worker} outlived its killed parent"
        finally:
            os.close(pidfd)
