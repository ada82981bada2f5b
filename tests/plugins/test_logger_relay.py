"""The relay and the CSV and TensorBoard sinks: two or three "ranks" in one process, each with its own logger objects.

A rank dies by being abandoned: its buffers stay in memory, never flushed, until the test has looked at the files.
"""

from __future__ import annotations

import csv
import importlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_cann.errors import ConfigurationError
from lightning_cann.plugins import LoggerRelay
from lightning_cann.plugins.sinks import Written, _tensorboard_events

NAMESPACES = ["lightning.pytorch", "pytorch_lightning"]


def loggers_of(namespace: str) -> Any:
    return importlib.import_module(f"{namespace}.loggers")


class Rank:
    """One rank: loggers, relay, and whether it leads."""

    def __init__(self, loggers: list[Any], leader: bool = False, **kwargs: Any) -> None:
        self.leader = leader
        self.loggers = loggers
        self.relay = LoggerRelay(SimpleNamespace(loggers=loggers), is_leader=lambda: self.leader, **kwargs)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for logger in self.loggers:
            logger.log_metrics(metrics=metrics, step=step)
            logger.save()  # as Lightning's connector does


def crew(make: Any, n: int = 2, **kwargs: Any) -> list[Rank]:
    ranks = [Rank([make()], leader=r == 0, **kwargs) for r in range(n)]
    identity = ranks[0].relay.identity()
    for rank in ranks[1:]:
        rank.relay.adopt_identity(identity)
    return ranks


def csv_rows(path: Path) -> list[tuple[int, frozenset[str]]]:
    with open(path, newline="") as file:
        return [
            (int(row["step"]), frozenset(k for k, v in row.items() if v != "" and k != "step"))
            for row in csv.DictReader(file)
        ]


def tensorboard_points(folder: Path) -> Counter[tuple[str, str, int]]:
    return Counter(
        (str(path.parent.relative_to(folder)), value.tag, event.step)
        for path in folder.rglob("*tfevents*")
        for event in _tensorboard_events(path)
        for value in event.summary.value
    )


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("flush_every", [1, 7])
def test_csv_goes_on_without_gap_or_duplicate(tmp_path: Path, namespace: str, flush_every: int) -> None:
    zero, one = crew(lambda: loggers_of(namespace).CSVLogger(tmp_path), flush_every=flush_every)
    assert one.loggers[0].version == 0
    expected = []
    for step in range(40):
        keys = {"loss": 0.5 * step, "epoch": 0} if step % 10 else {"val": 1.0}  # a new column appears at step 10's turn
        expected.append((step, frozenset(keys)))
        for rank in (zero, one):
            if rank.leader or step < 40:
                for logger in rank.loggers:
                    logger.log_metrics(keys, step)
        for rank in (zero, one)[: 1 if step == 25 else 2]:
            rank.relay.stable()
        if step == 25:  # the leader saw one collective more than the other rank, and dies
            break
    file = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    before = csv_rows(file)
    assert len(before) == (26 if flush_every == 1 else 21), "the leader had written what its flush interval says"
    one.leader = True
    one.relay.promote()
    for step in range(26, 40):
        expected.append((step, frozenset({"loss", "new"})))
        one.log({"loss": 1.0, "new": 2.0}, step)
        one.relay.stable()
    one.loggers[0].finalize("success")
    assert csv_rows(file) == expected
    assert sorted(p.name for p in (tmp_path / "lightning_logs").iterdir()) == ["version_0"]


def test_csv_torn_row_is_cut_off_and_written_again(tmp_path: Path) -> None:
    zero, one = crew(lambda: loggers_of(NAMESPACES[0]).CSVLogger(tmp_path))
    for step in range(5):
        for rank in (zero, one):
            rank.log({"loss": float(step)}, step)
            rank.relay.stable()
    file = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    file.write_bytes(file.read_bytes()[:-4])
    Path(f"{file}.rewrite").write_text("left behind by a kill while a column was added")
    one.leader = True
    one.relay.promote()
    assert csv_rows(file) == [(s, frozenset({"loss"})) for s in range(5)]
    assert [p.name for p in file.parent.iterdir()] == ["metrics.csv"]


def test_csv_new_column_never_truncates_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (zero,) = crew(lambda: loggers_of(NAMESPACES[0]).CSVLogger(tmp_path), n=1)
    zero.log({"a": 1.0}, 0)
    zero.relay.stable()
    file = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)  # the moment between writing the new file and putting it in place
    zero.log({"b": 1.0}, 1)
    with pytest.raises(KeyboardInterrupt):
        zero.relay.stable()
    assert csv_rows(file) == [(0, frozenset({"a"}))]


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_tensorboard_goes_on_in_the_same_directory(tmp_path: Path, namespace: str) -> None:
    make = lambda: loggers_of(namespace).TensorBoardLogger(tmp_path, purge_step=0)  # noqa: E731
    zero, one = crew(make, flush_every=10)
    expected: Counter[tuple[str, str, int]] = Counter()

    def metrics(step: int) -> dict[str, Any]:
        found: dict[str, Any] = {"loss": 1.0 * step, "epoch": 0}
        if step % 3 == 0:
            found["both"] = {"x": 1.0, "y": 2.0}
        for name in found:
            if name == "both":
                expected["both_x", "both", step] += 1
                expected["both_y", "both", step] += 1
            else:
                expected[".", name, step] += 1
        return found

    for step in range(25):
        m = metrics(step)
        for rank in (zero, one):
            rank.loggers[0].log_metrics(m, step)
            rank.relay.stable()
    folder = tmp_path / "lightning_logs" / "version_0"
    die(zero.loggers[0], lose=5)
    assert 0 < tensorboard_points(folder).total() < expected.total()
    one.leader = True
    one.relay.promote()
    for step in range(25, 30):
        m = metrics(step)
        one.log(m, step)
        one.relay.stable()
    one.loggers[0].finalize("success")
    assert tensorboard_points(folder) == expected

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder))
    shown.Reload()
    assert [e.step for e in shown.Scalars("loss")] == list(range(30))
    zero.loggers[0].experiment.close()


def test_tensorboard_ignores_events_of_an_earlier_run_in_the_same_directory(tmp_path: Path) -> None:
    script = (
        "from torch.utils.tensorboard import SummaryWriter; import sys; w = SummaryWriter(sys.argv[1]);"
        "[w.add_scalar('loss', 9., s) for s in range(10)]; w.close()"
    )
    folder = tmp_path / "lightning_logs" / "again"
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True)
    zero, one = crew(lambda: loggers_of(NAMESPACES[0]).TensorBoardLogger(tmp_path, version="again"))
    for rank in (zero, one):
        rank.loggers[0].log_metrics({"loss": 1.0}, 3)
    one.leader = True
    one.relay.promote()
    one.relay.stable()
    assert tensorboard_points(folder)[".", "loss", 3] == 2, "once in the earlier run, once in this one"


@pytest.mark.parametrize("kind", ["CSVLogger", "TensorBoardLogger"])
def test_leader_process_killed(tmp_path: Path, kind: str) -> None:
    """The same with a real SIGKILL: the leader is another process, killed in the middle of its steps."""
    script = f"""
import os, signal, sys
from types import SimpleNamespace
from lightning_cann.plugins import LoggerRelay
from lightning.pytorch.loggers import {kind}
logger = {kind}(sys.argv[1], version=3)
relay = LoggerRelay(SimpleNamespace(loggers=[logger]), is_leader=lambda: True, flush_every=4)
identity = relay.identity()
for step in range(31):
    logger.log_metrics({{"loss": 1.0, "epoch": 0}}, step)
    relay.stable()
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=env, timeout=60)
    assert done.returncode == -signal.SIGKILL
    logger = getattr(loggers_of(NAMESPACES[0]), kind)(tmp_path)
    one = Rank([logger])
    name = {"CSVLogger": "csv", "TensorBoardLogger": "tensorboard"}[kind]
    one.relay.adopt_identity(
        {"loggers": [{"kind": name, "version": 3, "name": "lightning_logs", "baseline": []}]}
    )
    for step in range(32):
        one.log({"loss": 2.0, "epoch": 0}, step)
    one.relay.stable(31)
    one.leader = True
    one.relay.promote()
    one.relay.stable()
    logger.finalize("success")
    folder = tmp_path / "lightning_logs" / "version_3"
    if kind == "CSVLogger":
        assert csv_rows(folder / "metrics.csv") == [(s, frozenset({"loss", "epoch"})) for s in range(32)]
    else:
        points = tensorboard_points(folder)
        assert points == Counter({(".", tag, s): 1 for tag in ("loss", "epoch") for s in range(32)})


def die(logger: Any, lose: int) -> None:
    """The process ends: nothing of it writes any more.  ``lose``: bytes at the end of its file that did not make it."""
    if type(logger).__name__ == "TensorBoardLogger":
        # its thread lives on here; a dead process has either written what is queued, or it has not (`lose`)
        path = Path(logger.experiment.file_writer.event_writer._file_name)
        logger.experiment.flush()
    else:
        path = Path(logger.experiment.metrics_file_path)
    if path.exists():
        os.truncate(path, max(0, path.stat().st_size - lose))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), flush_every=st.integers(1, 5), kind=st.sampled_from(["csv", "tensorboard"]))
def test_any_kill_point(tmp_path_factory: pytest.TempPathFactory, seed: int, flush_every: int, kind: str) -> None:
    """Random logs, collectives and deaths of leaders: the files hold every call that became stable, once, in order.

    A collective is completed by every rank or, in the instant of a death, by the leader or the others only.
    """
    rng = random.Random(seed)
    root = tmp_path_factory.mktemp("any")
    loggers = loggers_of(rng.choice(NAMESPACES))
    make = (lambda: loggers.CSVLogger(root)) if kind == "csv" else (lambda: loggers.TensorBoardLogger(root))
    hold = rng.choice([40, 2000])
    ranks = crew(make, n=3, flush_every=flush_every, hold=hold)
    dead, expected, step = [], [], 0
    deaths = sorted(rng.sample(range(1, 60), 2))
    for turn in range(60):
        for _ in range(rng.choice([0, 1, 1, 2])):
            step += rng.choice([0, 1, 1, 5])
            keys = frozenset([*rng.sample(["loss", "acc", "lr", "grad"], rng.randint(1, 3)), "epoch"])
            expected.append((step, keys))
            for rank in ranks:
                rank.loggers[0].log_metrics({k: rng.random() for k in keys}, step)
        marks = [rank.relay.mark() for rank in ranks]
        # every rank has entered the collective, so every rank holds all calls before it; who completes it?
        completes = [True] * len(ranks)
        if turn in deaths:
            completes = [rng.random() < 0.5 for _ in ranks]
        for rank, mark, done in zip(ranks, marks, completes, strict=True):
            if done:
                rank.relay.stable(mark)
        if turn in deaths:
            dead.append(ranks.pop(0))
            die(dead[-1].loggers[0], lose=rng.choice([0, 0, 1, 30, 200]) if hold > 40 else 0)
            ranks[0].leader = True
            if rng.random() < 0.8:  # the strategy promotes, or a later stable() does
                ranks[0].relay.promote()
            for rank in ranks:
                rank.relay.stable()
    ranks[0].loggers[0].finalize("success")
    folder = root / "lightning_logs" / "version_0"
    if kind == "csv":
        assert csv_rows(folder / "metrics.csv") == expected
    else:
        assert tensorboard_points(folder) == Counter((".", k, s) for s, keys in expected for k in keys)
    for rank in dead:
        if kind == "tensorboard":
            rank.loggers[0].experiment.close()


def test_unstable_calls_stay_in_and_others_write_nothing(tmp_path: Path) -> None:
    zero, one = crew(lambda: loggers_of(NAMESPACES[0]).CSVLogger(tmp_path))
    file = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    for rank in (zero, one):
        rank.log({"loss": 1.0}, 0)
        mark = rank.relay.mark()
        rank.log({"loss": 1.0}, 1)
        assert not file.exists() or csv_rows(file) == [(0, frozenset({"loss"}))]
        rank.relay.stable(mark)
    assert csv_rows(file) == [(0, frozenset({"loss"}))]
    one.loggers[0].finalize("success")
    zero.loggers[0].finalize("failed")  # the step may not stand: its log line does not leave
    assert csv_rows(file) == [(0, frozenset({"loss"}))]
    zero.loggers[0].finalize("success")
    assert len(csv_rows(file)) == 2


def test_repeated_rows_count_as_often_as_they_were_logged(tmp_path: Path) -> None:
    zero, one = crew(lambda: loggers_of(NAMESPACES[0]).CSVLogger(tmp_path), hold=4)
    for i in range(12):  # the same step and columns: e.g. validate() called again
        for rank in (zero, one):
            rank.log({"val": float(i)}, 7)
            if i < 11:
                rank.relay.stable()
    one.leader = True
    one.relay.promote()
    one.relay.stable()
    assert len(csv_rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")) == 12


def test_leadership_goes_back_to_a_rank_that_returned(tmp_path: Path) -> None:
    make = lambda: loggers_of(NAMESPACES[0]).CSVLogger(tmp_path)  # noqa: E731
    zero, one = crew(make)
    file = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"

    def step(ranks: list[Rank], s: int) -> None:
        for rank in ranks:
            rank.log({"loss": 1.0}, s)
        for rank in ranks:
            rank.relay.stable()

    step([zero, one], 0)
    one.leader = True
    one.relay.promote()
    step([one], 1)
    again = Rank([make()])
    again.relay.adopt_identity(one.relay.identity())
    step([again, one], 2)
    one.relay.demote()
    one.leader, again.leader = False, True
    again.relay.promote()
    step([again, one], 3)
    again.leader, one.leader = False, True  # and it dies again
    one.relay.promote()
    step([one], 4)
    assert csv_rows(file) == [(s, frozenset({"loss"})) for s in range(5)]


def test_next_fit_with_the_same_loggers_continues(tmp_path: Path) -> None:
    zero, one = crew(lambda: loggers_of(NAMESPACES[0]).CSVLogger(tmp_path))
    file = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    for rank in (zero, one):
        rank.log({"loss": 1.0}, 0)
        rank.relay.stable()
        rank.relay.close()
    one = Rank(one.loggers)  # rank 0 died between the two fits
    one.leader = True
    one.relay.identity()
    one.log({"loss": 1.0}, 0)
    one.relay.stable()
    assert csv_rows(file) == [(0, frozenset({"loss"}))] * 2, "validated twice at the same step is two rows"


def test_held_calls_are_bounded_and_forgotten_when_durable(tmp_path: Path) -> None:
    zero, one = crew(lambda: loggers_of(NAMESPACES[0]).CSVLogger(tmp_path), hold=10)
    for step in range(25):
        for rank in (zero, one):
            rank.log({"loss": torch.tensor(1.0)}, step)
    assert len(one.relay._channels[0].held) == 10
    assert zero.relay.durable() == [None], "nothing is stable yet"
    for rank in (zero, one):
        rank.relay.stable()
    assert zero.relay.durable() == [24]
    assert len(one.relay._channels[0].held) == 10
    one.relay.forget([20])
    assert [e.step for e in one.relay._channels[0].held] == [21, 22, 23, 24]
    one.leader = True
    one.relay.promote()
    assert [s for s, _ in csv_rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")] == list(range(25))


def test_tensors_are_logged_as_they_were(tmp_path: Path) -> None:
    (zero,) = crew(lambda: loggers_of(NAMESPACES[0]).CSVLogger(tmp_path), n=1)
    value = torch.tensor(1.0)
    zero.log({"loss": value}, 0)
    value += 5
    zero.relay.stable()
    text = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert text.split() == ["loss,step", "1.0,0"]


@pytest.mark.parametrize("kind", ["CSVLogger", "TensorBoardLogger"])
@pytest.mark.parametrize("written", [True, False])
def test_hyperparameters_survive_once(tmp_path: Path, kind: str, written: bool) -> None:
    zero, one = crew(lambda: getattr(loggers_of(NAMESPACES[0]), kind)(tmp_path))
    for rank in (zero, one) if written else (one,):
        rank.loggers[0].log_hyperparams({"lr": 0.5})
        rank.loggers[0].save()
    one.leader = True
    one.relay.promote()
    one.loggers[0].save()
    folder = tmp_path / "lightning_logs" / "version_0"
    assert "lr: 0.5" in (folder / "hparams.yaml").read_text()
    if kind == "TensorBoardLogger":
        assert tensorboard_points(folder)[".", "hp_metric", 0] == 1


def test_logger_that_cannot_be_read_back_goes_on_from_what_was_not_stable() -> None:
    from lightning.pytorch.loggers.logger import Logger
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    class Lines(Logger):
        name, version = "lines", 0

        def __init__(self) -> None:
            super().__init__()
            self.steps: list[int] = []

        @rank_zero_only
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            assert step is not None
            self.steps.append(step)

        @rank_zero_only
        def log_hyperparams(self, params: Any) -> None:
            pass

    class EveryRank(Lines):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            assert step is not None
            self.steps.append(step)

    lines, every = [Lines(), Lines()], [EveryRank(), EveryRank()]
    zero, one = (Rank([lines[r], every[r]], leader=r == 0) for r in range(2))
    one.relay.adopt_identity(zero.relay.identity())
    for step in range(4):
        for rank in (zero, one):
            rank.log({"loss": 1.0}, step)
            if step < 3:
                rank.relay.stable()
    one.leader = True
    one.relay.stable()  # promotes by itself, before step 3 becomes stable
    assert (lines[0].steps, lines[1].steps) == ([0, 1, 2], [3])
    assert every[1].steps == [0, 1, 2, 3], "writes on every rank by design: not ours to hold back"


def test_close_gives_the_methods_back(tmp_path: Path) -> None:
    logger = loggers_of(NAMESPACES[0]).CSVLogger(tmp_path)
    before = set(vars(logger))
    rank = Rank([logger], leader=True)
    assert "log_metrics" in vars(logger)
    rank.relay.close()
    rank.relay.close()
    assert set(vars(logger)) - before == {"_lightning_cann_relay_state"}


def test_settings_and_mismatched_loggers_are_refused(tmp_path: Path) -> None:
    make = loggers_of(NAMESPACES[0])
    with pytest.raises(ConfigurationError, match="flush_every=100"):
        Rank([make.CSVLogger(tmp_path)], hold=150, flush_every=100)
    zero, one = Rank([make.CSVLogger(tmp_path)], leader=True), Rank([make.TensorBoardLogger(tmp_path)])
    with pytest.raises(ConfigurationError, match="tensorboard"):
        one.relay.adopt_identity(zero.relay.identity())


def test_written_claims_each_unit_once() -> None:
    written = Written([(1, "a"), (1, "a"), (2, "b"), (3, "c")], min_step=1)
    assert [written.claim(1, "a") for _ in range(3)] == [True, True, False]
    assert written.last_step == 3
    tail = Written([(s, "a") for s in range(10)], keep=3)
    assert [s for s in range(10) if tail.claim(s, "a")] == [7, 8, 9]
