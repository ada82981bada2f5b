"""W&B offline: the leader is a process of its own that is killed with SIGKILL; the next one goes on in the same run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("wandb")

from wandb.proto.wandb_internal_pb2 import Record

from lightning_cann.plugins import LoggerRelay
from lightning_cann.plugins.wandb_sink import _await_writers, _leveldb_records, _wandb_history

SCRIPT = """
import json, os, signal, sys
from types import SimpleNamespace
from lightning_cann.plugins import LoggerRelay
from {namespace}.loggers import WandbLogger
role, folder = sys.argv[1], sys.argv[2]
leads = role == "leader"
logger = WandbLogger(project="p", save_dir=folder, offline=True, prefix="x")
relay = LoggerRelay(SimpleNamespace(loggers=[logger]), is_leader=lambda: leads)
if leads:
    with open(folder + "/identity.json", "w") as file:
        json.dump(relay.identity(), file)
else:
    relay.adopt_identity(json.load(open(folder + "/identity.json")))
logger.log_hyperparams({{"lr": 0.5}})
for step in range(200):
    if step == 150 and leads:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 151:  # the other rank had not yet completed the last collectives of the leader when that died
        leads = True
        relay.promote()
    logger.log_metrics({{"loss": step * 0.5, "epoch": 0}}, step)
    if step % 50 == 49:
        logger.log_metrics({{"val": 1.0, "epoch": 0}}, step)
    if leads or step < 145:
        relay.stable()
logger.finalize("success")
logger.experiment.finish()
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime)


def history(folder: Path) -> list[tuple[int, int | None, frozenset[str]]]:
    return [row for path in runs(folder) for row in _wandb_history(str(path))]


@pytest.mark.parametrize(
    "namespace", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.slow)]
)
def test_wandb_goes_on_in_the_same_run(tmp_path: Path, namespace: str) -> None:
    def role(name: str) -> int:
        command = [sys.executable, "-c", SCRIPT.format(namespace=namespace), name, str(tmp_path)]
        return subprocess.run(command, timeout=100).returncode

    assert role("leader") == -signal.SIGKILL
    # no wait here: the successor has to wait for the dead leader's wandb-core by itself
    assert role("other") == 0
    first, second = runs(tmp_path)
    assert first.name == second.name, "the same run ID"
    expected: list[tuple[int, frozenset[str]]] = []
    for step in range(200):
        expected.append((step, frozenset({"x-loss", "x-epoch"})))
        if step % 50 == 49:
            expected.append((step, frozenset({"x-val", "x-epoch"})))
    rows = history(tmp_path)
    assert [(step, keys) for _, step, keys in rows] == expected
    assert [row for row, _, _ in rows] == list(range(len(rows))), "W&B's own step goes on too: `wandb sync` keeps all"
    assert sum(1 for _ in _wandb_history(str(first))) > 0
    records = [Record.FromString(data) for data in _leveldb_records(str(second))]
    assert ("lr", "0.5") in {(i.key, i.value_json) for r in records for i in r.config.update}


def test_wandb_torn_log_and_other_machine(tmp_path: Path) -> None:
    """The dead leader's node took the end of the file along; or the file is not to be seen from here at all."""
    from lightning.pytorch.loggers import WandbLogger

    def rank(folder: Path, leader: bool) -> tuple[Any, LoggerRelay, list[bool]]:
        leads = [leader]
        logger = WandbLogger(project="p", save_dir=folder, offline=True)
        return logger, LoggerRelay(SimpleNamespace(loggers=[logger]), is_leader=lambda: leads[0]), leads

    zero, relay, _ = rank(tmp_path, True)
    identity = relay.identity()
    for step in range(30):
        zero.log_metrics({"loss": 1.0}, step)
        relay.stable()
    relay.demote()
    (first,) = runs(tmp_path)
    whole = len(list(_wandb_history(str(first))))
    assert whole == 30
    while (left := len(list(_wandb_history(str(first))))) > 20:  # other records lie behind the rows
        os.truncate(first, first.stat().st_size - 37)
    assert left > 0

    one, relay, leads = rank(tmp_path, False)
    relay.adopt_identity(identity)
    for step in range(31):
        one.log_metrics({"loss": 1.0}, step)
        if step < 30:
            relay.stable()
    leads[0] = True
    relay.promote()
    relay.stable()
    relay.demote()
    assert [step for _, step, _ in history(tmp_path)] == list(range(31))

    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    two, relay, leads = rank(elsewhere, False)
    for entry in identity["loggers"]:
        entry["dir"] = str(elsewhere / "wandb")
    relay.adopt_identity(identity)
    for step in range(32):
        two.log_metrics({"loss": 1.0}, step)
        if step < 30:
            relay.stable()
    leads[0] = True
    relay.promote()
    relay.stable()
    relay.demote()
    assert [step for _, step, _ in history(elsewhere)] == [30, 31], "what was stable counts as written"


def test_records_longer_than_a_block_and_damage(tmp_path: Path) -> None:
    import struct
    import zlib

    def fragment(kind: int, body: bytes) -> bytes:
        crc = zlib.crc32(body, zlib.crc32(bytes([kind])))
        return struct.pack("<IHB", crc, len(body), kind) + body

    size = 32768
    head = b":W&B\xe1\xbe\x00"
    long = bytes(range(256)) * 300
    data = head + fragment(1, b"short")
    room = size - len(data) - 7
    data += fragment(2, long[:room])
    data += fragment(3, long[room : room + size - 7])
    data += fragment(4, long[room + size - 7 :])
    padding = size - len(data) % size
    data += fragment(1, b"p" * (padding - 7 - 3)) + b"\0" * 3  # too little room for a header: zeros
    data += fragment(1, b"last")
    path = tmp_path / "run-x.wandb"
    path.write_bytes(data)
    assert [len(r) for r in _leveldb_records(str(path))] == [5, len(long), padding - 10, 4]
    assert list(_leveldb_records(str(path)))[1] == long
    for cut in (len(data) - 1, len(data) - 5, len(data) - 11):
        path.write_bytes(data[:cut])
        assert len(list(_leveldb_records(str(path)))) == 3
    path.write_bytes(data[:-1] + b"T")
    assert len(list(_leveldb_records(str(path)))) == 3, "checksum"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="process descriptors are a Linux thing")
def test_waits_for_the_process_that_still_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file"
    path.touch()
    writer = "import sys; f = open(sys.argv[1], 'a'); print('open', flush=True); sys.stdin.read(); f.write('end')"
    with subprocess.Popen(
        [sys.executable, "-c", writer, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        _await_writers([str(path)], timeout=0.05)
        assert "going on without waiting" in caplog.text
        process.stdin.close()
        _await_writers([str(path)], timeout=30)
        assert path.read_text() == "end"
