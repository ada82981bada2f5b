"""One small training job in which ranks die, and what every rank says about it afterwards.

    result = run(Scenario(faults=(Fault(1, "forward", 3),), rejoins=1), world_size=3)
    check_equal(result)            # survivors and replacements: same state to the bit, after every step
    check_exactly_once(result)     # two audits: the strategy's own, and one of what training_step really saw

``train`` is the user's script.  Points at which a :class:`~tests.support.training.Fault` can strike: ``"launch"`` (the
script has started), ``"batch_start"``, ``"forward"``, ``"backward"``, ``"batch_end"`` (numbered by batches since the start
of the fit), ``"validation"``, ``"sync_log"``, ``"checkpoint"``, ``"epoch_end"`` (numbered by epochs), and those of the engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_cann.strategies import FaultTolerantStrategy
from tests.support.job import JobResult, is_replacement, record, run_job
from tests.support.training import Fault, Points, Regression, loader, quiet_trainer, weights_hash


@dataclasses.dataclass(kw_only=True)
class Scenario:
    faults: tuple[Fault, ...] = ()
    rejoins: int = 0
    """Training goes on until so many replacements have joined, and for one epoch more."""
    epochs: int = 1
    """Epochs, if no replacement is waited for."""
    samples: int = 74
    batch_size: int = 4
    pace_s: float = 0.0
    """What a forward takes at least (seconds): a replacement has to start beside the others on the same cores."""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the DataLoader."""
    kind: str = "map"
    """"map", "sampler", "batch_sampler" or "iterable"."""
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    validate: bool = False
    checkpoint: bool = False
    ckpt_path: str | None = None
    books: str = "."
    """Folder of the books that ranks keep; given: the audit covers all jobs that use it."""
    raises: tuple[tuple[int, ...], int] | None = None
    """(ranks, batch): there training_step raises ValueError, in first processes."""
    loggers: str | None = None
    """Folder for a CSV and a TensorBoard logger."""
    fp16: bool = False
    """Mixed precision with a GradScaler whose scale changes every three steps."""


@dataclasses.dataclass
class Said:
    """What one process records when its fit is over."""

    weights: str
    step: int
    epoch: int
    states: dict[int, dict[str, Any]]
    """number of batches so far -> everything a rank must share with the others after that batch, by part."""
    parts: dict[str, Any]
    audit: dict[int, dict[str, Any]]
    seen: list[str]
    """What is wrong with the samples that the committed steps really saw; empty: each was used once per epoch."""
    replacement: bool
    error: str = ""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


def digest(value: Any) -> str:
    """SHA-256 of nested containers of tensors and plain values, to the bit."""
    sha = hashlib.sha256()

    def feed(x: Any) -> None:
        if isinstance(x, torch.Tensor):
            sha.update(str((x.dtype, tuple(x.shape))).encode())
            sha.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, dict):
            for key in sorted(x, key=str):
                sha.update(str(key).encode())
                feed(x[key])
        elif isinstance(x, (list, tuple)):
            sha.update(b"[")
            for item in x:
                feed(item)
        else:
            sha.update(repr(x).encode())

    feed(value)
    return sha.hexdigest()


def shared_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Everything that must be the same at all ranks after a step, by part."""
    fit = trainer.fit_loop
    return {
        "weights": weights_hash(trainer.lightning_module),
        "optimizers": digest([o.state_dict() for o in trainer.optimizers]),
        "schedulers": digest([c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]),
        "precision": digest(trainer.precision_plugin.state_dict()),
        "callbacks": {c.state_key.split("{")[0]: digest(c.state_dict()) for c in trainer.callbacks},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batch": fit.epoch_loop.batch_progress.current.processed,
        "total": fit.epoch_loop.batch_progress.total.processed,
        "stepped": fit.epoch_loop._batches_that_stepped,
    }


class Doomed(Regression):
    """Regression in which ranks die, and which keeps books: per step a hash of the state, and which samples were used."""

    def __init__(self, scenario: Scenario, **options: Any) -> None:
        super().__init__(**options)
        self.scenario = scenario
        self.states: dict[int, dict[str, Any]] = {}
        book = Path(scenario.books) / f"book.{os.environ['CANN_FT_MEMBER_ID']}"
        self._book = os.open(book, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.reach("handover", 0)

    @property
    def group(self) -> Any:
        return self.trainer.strategy._group

    def reach(self, point: str, step: int) -> None:
        for fault in self.scenario.faults:
            fault.reach(point, step, self.group)

    def note(self, *what: Any) -> None:
        os.write(self._book, (json.dumps([os.environ["CANN_FT_JOB_ID"], *what]) + "\n").encode())

    def batch_number(self) -> int:
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1

    def on_train_start(self) -> None:
        transport = self.trainer.strategy._transport
        committed = transport._on_commit

        def on_commit(ranks: tuple[int, ...]) -> None:
            epoch, step, rank = self.trainer.current_epoch, self.trainer.global_step, int(os.environ["CANN_FT_RANK"])
            self.note("commit", epoch, step, rank, list(ranks))
            committed(ranks)

        transport._on_commit = on_commit

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        number = self.batch_number()
        self.reach("batch_start", number)
        index = batch[0].tolist()
        weight = self.trainer.strategy._data.weight()
        self.note("batch", self.trainer.current_epoch, self.trainer.global_step, int(os.environ["CANN_FT_RANK"]), weight, index)
        if self.scenario.pace_s:
            time.sleep(self.scenario.pace_s)
        ranks, step = self.scenario.raises or ((), 0)
        if number == step and int(os.environ["CANN_FT_RANK"]) in ranks and not is_replacement():
            raise ValueError("a bad sample")
        hidden = self.net[0](batch[1])
        self.reach("forward", number)
        hidden.register_hook(lambda grad: self.reach("backward", number))
        loss = torch.nn.functional.mse_loss(self.net[1:](hidden), batch[2])
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.states[self.batch_number() + 1] = shared_state(self.trainer)
        self.reach("batch_end", self.batch_number())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.reach("validation", self.trainer.current_epoch)
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.reach("sync_log", self.trainer.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.reach("epoch_end", self.trainer.current_epoch)
        scenario = self.scenario
        if scenario.rejoins:
            # member ids say which process of its rank it is, from 1
            replaced = sum(int(x.member_id.split("-")[1]) - 1 for x in self.group.view.members)
            back = replaced >= scenario.rejoins
            # the first step of the view that admitted the last replacement began in this epoch, or in an earlier one
            whole = self.group.view.steps >= 2 * self.trainer.fit_loop.epoch_loop.batch_progress.current.processed
            self.trainer.should_stop = back and whole

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class DoomedCheckpoint(ModelCheckpoint):
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        module.reach("checkpoint", trainer.current_epoch)
        super().on_validation_end(trainer, module)


class EveryOther(torch.utils.data.Sampler):
    """A user's own sampler: even indices, then odd ones backwards."""

    def __init__(self, n: int) -> None:
        self.order = [*range(0, n, 2), *range(1, n, 2)[::-1]]

    def __iter__(self) -> Any:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Lumps(torch.utils.data.Sampler):
    """A user's own batch sampler: batches of 1, 2, 3, 1, 2, 3, ... samples."""

    def __init__(self, n: int) -> None:
        self.batches, start = [], 0
        while start < n:
            size = len(self.batches) % 3 + 1
            self.batches.append(list(range(start, min(n, start + size))))
            start += size

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, n: int) -> None:
        self.points = Points(n)

    def __iter__(self) -> Any:
        rank, world = int(os.environ["CANN_FT_RANK"]), int(os.environ["CANN_FT_WORLD_SIZE"])
        return (self.points[i] for i in range(rank, len(self.points), world))


def make_loader(s: Scenario) -> Any:
    if s.kind == "iterable":
        return torch.utils.data.DataLoader(Stream(s.samples), batch_size=s.batch_size, **s.data)
    if s.kind == "sampler":
        return loader(s.samples, s.batch_size, sampler=EveryOther(s.samples), **s.data)
    if s.kind == "batch_sampler":
        return torch.utils.data.DataLoader(Points(s.samples), batch_sampler=Lumps(s.samples), **s.data)
    return loader(s.samples, s.batch_size, **{"shuffle": True, **s.data})


def make_callbacks(s: Scenario) -> list[Any]:
    found: list[Any] = []
    if s.validate:
        found.append(EarlyStopping("val_loss", patience=1000))
    if s.checkpoint:
        found.append(DoomedCheckpoint(monitor="val_loss", save_top_k=2))
    return found


def make_plugins(s: Scenario) -> list[Any]:
    if not s.fp16:
        return []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)]


def make_loggers(s: Scenario) -> Any:
    if s.loggers is None:
        return False
    return [CSVLogger(s.loggers, name="csv", flush_logs_every_n_steps=1), TensorBoardLogger(s.loggers, name="tb")]


def train(s: Scenario) -> None:
    """The script that every rank runs."""
    for fault in s.faults:
        fault.at("launch", 0) if fault.armed_at is None else None
    pl.seed_everything(1, verbose=False)
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda line: warned.append(line.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_cann").addHandler(handler)
    model = Doomed(s)
    callbacks = make_callbacks(s)
    trainer = quiet_trainer(
        **{
            "strategy": FaultTolerantStrategy(audit=True, **{"divergence_every_n_steps": 0, **s.strategy}),
            "max_epochs": 2000 if s.rejoins else s.epochs,
            "callbacks": callbacks,
            "enable_checkpointing": s.checkpoint,
            "plugins": make_plugins(s),
            "logger": make_loggers(s),
            **s.trainer,
        }
    )
    validation = loader(24) if s.validate else None
    error = ""
    try:
        trainer.fit(model, make_loader(s), validation, ckpt_path=s.ckpt_path)
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
        raise
    finally:
        record(describe(trainer, model, error, warned))


def describe(trainer: pl.Trainer, model: Doomed, error: str, warned: list[str]) -> Said:
    parts = shared_state(trainer) if trainer.optimizers else {}
    extra: dict[str, Any] = {"warnings": warned}
    if trainer.checkpoint_callback is not None:
        best = trainer.checkpoint_callback.best_k_models
        extra["best"] = sorted(os.path.basename(p) for p in best)
        extra["on_disk"] = sorted(os.path.basename(p) for p in Path(trainer.checkpoint_callback.dirpath).glob("*.ckpt"))
    return Said(
        weights=weights_hash(model),
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        states=model.states,
        parts=parts,
        audit=trainer.strategy.data_audit(),
        seen=[] if error else audit_books(model.scenario),
        replacement=is_replacement(),
        error=error,
        extra=extra,
    )


def audit_books(s: Scenario) -> list[str]:
    """Compares what ``training_step`` saw, in steps that were committed, with the data set: independent of the ledger."""
    commits: dict[tuple[str, int, int], dict[int, list[int]]] = {}
    batches: dict[tuple[str, int, int, int], list[int]] = {}
    wrong = []
    for path in sorted(Path(s.books).glob("book.*")):
        for line in path.read_text().splitlines():
            job, kind, epoch, step, *rest = json.loads(line)
            if kind == "commit":
                commits.setdefault((job, epoch, step), {})[rest[0]] = rest[1]
            elif rest[1]:
                batches.setdefault((job, epoch, step, rest[0]), []).extend(rest[2])
    used: dict[int, Counter[int]] = {}
    for (job, epoch, step), said in commits.items():
        # A rank that completed a step and died before anybody else did takes that with it: the later, smaller view counts.
        ranks = min(said.values(), key=len)
        wrong += [f"step {step}: {ranks}, but {said[r]} at rank {r}" for r in ranks if said.get(r, ranks) != ranks]
        for rank in ranks:
            used.setdefault(epoch, Counter()).update(batches.get((job, epoch, step, rank), []))
    for epoch, counts in sorted(used.items()):
        twice = sorted(i for i, n in counts.items() if n > 1)
        missing = sorted(set(range(s.samples)) - set(counts))
        if twice or missing:
            wrong.append(f"epoch {epoch}: used more than once {twice}, not used {missing}")
    return wrong


def run(s: Scenario, world_size: int = 3, **options: Any) -> JobResult:
    return run_job(train, world_size, (s,), max_failures=options.pop("max_failures", None), **options)


# ---------------------------------------------------------------------------------------------- what must hold


def check_equal(result: JobResult, ranks: int, *, replaced: int = 0) -> None:
    """``ranks`` processes came to the end, ``replaced`` of them replacements, with the same state after every step."""
    assert result.code == 0, (result.code, result.failure, result.events[-5:])
    ended = {member: said for _, member, said in result.all_values if not said.error}
    assert len(ended) == ranks, sorted(ended)
    assert sum(said.replacement for said in ended.values()) == replaced, sorted(ended)
    first = next(iter(ended.values()))
    for member, said in ended.items():
        differing = {k: (v, first.parts[k]) for k, v in said.parts.items() if v != first.parts[k]}
        assert not differing, f"{member} at the end: {differing}"
    states: dict[int, dict[str, Any]] = {}
    for member, said in ended.items():
        for batch, state in said.states.items():
            other = states.setdefault(batch, state)
            differing = {k: (v, other[k]) for k, v in state.items() if v != other[k]}
            assert not differing, f"{member} after batch {batch}: {differing}"
    batches = first.parts["total"]
    for member, said in ended.items():  # from its first batch on, none was skipped
        begin = min(said.states)
        assert sorted(said.states) == list(range(begin, batches + 1)), member
        assert begin == 1 or said.replacement, member


def check_exactly_once(result: JobResult) -> None:
    for _, member, said in result.all_values:
        if not said.error:
            assert said.seen == [], (member, said.seen)
            for epoch, numbers in said.audit.items():
                assert numbers["duplicates"] == numbers["missing"] == 0, (member, epoch, numbers)
            assert said.audit, member


def latencies(result: JobResult) -> list[float]:
    """Seconds from the break of a view to the connection of the next, at the slowest member, as the engine measured them."""
    return [event["latency_s"] for event in result.named("recovered")]
