"""A real Trainer with CSV, TensorBoard and W&B: the logs of a killed leader and its successor are those of a whole run.

Three processes run the same training, one after the other: plain Lightning; a leader that is killed with SIGKILL; and
a rank 1 that sees the same steps and is promoted where the leader died.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("wandb")
pytest.importorskip("tensorboard")

from lightning_cann.plugins.sinks import _tensorboard_events
from lightning_cann.plugins.wandb_sink import _wandb_history

SCRIPT = """
import json, os, signal, sys, torch
torch.set_num_threads(1)
import {namespace} as pl
from {namespace}.callbacks import Callback
from {namespace}.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from lightning_cann.plugins import LoggerRelay, promote_progress_bar
role, root = sys.argv[1], sys.argv[2]
folder = root + ("/whole" if role == "whole" else "/killed")

class Model(pl.LightningModule):
    def __init__(self, width=1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, width)
    def training_step(self, batch, i):
        loss = self.layer(batch).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        if i % 4 == 0:
            self.log("rare", float(i))
        return loss
    def validation_step(self, batch, i):
        self.log("val", self.layer(batch).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Relay(Callback):
    leads = role == "leader"
    def install(self, trainer):
        if role == "leader":
            self.relay = LoggerRelay(trainer, is_leader=lambda: self.leads)
            with open(folder + "/identity.json", "w") as file:
                json.dump(self.relay.identity(), file)
        elif role == "other":
            rank_zero_only.rank = 1
            self.relay = LoggerRelay(trainer, is_leader=lambda: self.leads)
            self.relay.adopt_identity(json.load(open(folder + "/identity.json")))
    def on_train_start(self, trainer, module):
        if role == "other":
            trainer.progress_bar_callback.disable()
    def on_before_optimizer_step(self, trainer, module, optimizer):
        if role == "whole":
            return
        step = trainer.global_step
        if role == "leader" or step != 17:  # the other rank has not completed the collective that the leader has
            self.relay.stable()
        if step == 17 and role == "leader":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 17:
            rank_zero_only.rank = 0
            self.leads = True
            self.relay.promote()
            self.relay.stable()
            assert promote_progress_bar(trainer)

os.makedirs(folder, exist_ok=True)
callback = Relay()
loader = torch.utils.data.DataLoader(torch.ones(12, 2), batch_size=1)
loggers = [CSVLogger(folder), TensorBoardLogger(folder), WandbLogger(project="p", save_dir=folder, offline=True)]
trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=3, log_every_n_steps=1, enable_model_summary=False,
                     logger=loggers, callbacks=[callback], default_root_dir=folder, enable_checkpointing=False)
callback.install(trainer)
trainer.fit(Model(), loader, loader)
import wandb
wandb.teardown()
"""


@pytest.mark.parametrize(
    "namespace", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.slow)]
)
def test_logs_of_a_killed_leader_are_those_of_a_whole_run(tmp_path: Path, namespace: str) -> None:
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "PYTHONPATH": os.pathsep.join(sys.path)}
    for role, code in (("whole", 0), ("leader", -signal.SIGKILL), ("other", 0)):
        command = [sys.executable, "-c", SCRIPT.format(namespace=namespace), role, str(tmp_path)]
        done = subprocess.run(command, env=env, timeout=100, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    assert "Epoch 2" in done.stdout and "12/12" in done.stdout, "the progress bar goes on"
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def csv_rows(root: Path) -> list[tuple[int, frozenset[str]]]:
        # CSVLogger and TensorBoardLogger share the directory, as they do in Lightning
        (path,) = root.glob("lightning_logs/*/metrics.csv")
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        return [(int(r["step"]), frozenset(k for k, v in r.items() if v != "")) for r in rows]

    def points(root: Path) -> Counter[tuple[str, int]]:
        files = root.glob("lightning_logs/*/*tfevents*")
        return Counter(
            (value.tag, event.step) for f in files for event in _tensorboard_events(f) for value in event.summary.value
        )

    def history(root: Path) -> list[tuple[int, int | None, frozenset[str]]]:
        files = sorted(root.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.parent.name)
        return [row for f in files for row in _wandb_history(str(f))]

    assert len(csv_rows(whole)) > 40
    assert csv_rows(killed) == csv_rows(whole)
    assert points(killed) == points(whole)
    assert history(killed) == history(whole)
    assert "width: 1" in next(killed.glob("lightning_logs/*/hparams.yaml")).read_text()
    assert len({p.name for p in killed.glob("wandb/offline-run-*/*.wandb")}) == 1, "one W&B run"
