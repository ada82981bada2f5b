"""What W&B has on disk: the adapter for ``WandbLogger`` (see :mod:`.sinks`)."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import struct
import time
import zlib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from lightning_cann.plugins.sinks import Sink, Unit, Written

__all__ = ["WandbSink"]

log = logging.getLogger(__name__)


class WandbSink(Sink):
    """``WandbLogger``: history records of the transaction logs, which ``wandb-core`` writes online and offline."""

    kind = "wandb"
    # wandb-core outlives a killed rank and writes most of what it was sent (88 to 150 of 150 rows were seen to arrive);
    # a node that dies takes up to 15 s of rows along
    flush_is_durable = False
    #: seconds to wait for the wandb-core of a dead rank on this machine to finish its file
    writer_timeout = 10.0

    def __init__(self, logger: Any) -> None:
        super().__init__(logger)
        self._dir: str | None = None

    def open(self) -> None:
        run = self.logger.experiment
        self._dir = str(getattr(run.settings, "wandb_dir", "") or "") or None
        own = str(getattr(run.settings, "sync_file", ""))
        self.baseline = [p for p in self._files(run.id) if os.path.realpath(p) != os.path.realpath(own)]

    def identity(self) -> dict[str, Any]:
        run = self.logger.experiment
        return {
            "id": run.id,
            "project": run.project or None,
            "entity": run.entity or None,
            "name": run.name or None,
            "dir": os.path.abspath(self._dir) if self._dir else None,
            "baseline": [os.path.abspath(p) for p in self.baseline],
        }

    def adopt(self, identity: dict[str, Any]) -> None:
        logger, init = self.logger, self.logger._wandb_init
        if logger._experiment is not None and logger._experiment.id != identity["id"]:
            log.warning(
                "WandbLogger(experiment=...) gave this rank a W&B run of its own (%s, the leader's is %s): if this "
                "rank becomes the leader, its logs go there. Leave `experiment` out, or create the run on rank 0 only.",
                logger._experiment.id,
                identity["id"],
            )
        init.update(id=identity["id"], resume="allow")
        init.update({k: identity[k] for k in ("project", "entity", "name") if identity[k] is not None})
        for rewind in ("resume_from", "fork_from"):  # once is enough: again would drop what the dead leader logged
            init.pop(rewind, None)
        logger._id, logger._project = identity["id"], init.get("project")
        logger._attach_id = None  # of a wandb service that may be gone
        self._dir, self.baseline = identity["dir"], list(identity["baseline"])

    def resume(self, *, min_step: int | None, keep: int) -> Written | None:
        run_id = self.logger._wandb_init["id"]
        files = [p for p in self._files(run_id) if os.path.abspath(p) not in self.baseline]
        _await_writers(files, timeout=self.writer_timeout)
        units: list[Unit] = []
        last_row = -1
        for path in files:
            for row, step, key in _wandb_history(path):
                last_row = max(last_row, row)
                if step is not None:
                    units.append((step, key))
        run = self.logger.experiment
        if last_row >= 0 and run.id == run_id:
            # rows count on where the dead leader stopped; offline a resumed run would start again at 0
            run.log({}, step=last_row + 1, commit=False)
        # no file: another machine, and no shared directory; sync_tensorboard: rows without their step
        known = files and not self.logger._wandb_init.get("sync_tensorboard")
        return Written(units, min_step=min_step, keep=keep) if known else None

    def units(self, metrics: dict[str, Any]) -> dict[Hashable, dict[str, Any]]:
        return {frozenset(set(self._names(metrics)) - _WANDB_OWN): metrics}

    def close(self) -> None:
        import wandb

        self.logger.experiment.finish()
        self.logger._experiment = None
        # finish() returns milliseconds before wandb-core has written the last rows (seen with 0.31): this joins it
        wandb.teardown()

    def _files(self, run_id: str) -> list[str]:
        """Transaction logs of this run ID, oldest first (the directory's name begins with the time)."""
        if not self._dir or not os.path.isdir(self._dir):
            return []
        # offline-run-<time>-<id>, run-<time>-<id>, and a suffix for two in one second
        name = re.compile(rf"(?:offline-)?run-(\d+_\d+)-{re.escape(run_id)}(?:-.*)?")
        found = [(m[1], e.path) for e in os.scandir(self._dir) if (m := name.fullmatch(e.name))]
        paths = [os.path.join(path, f"run-{run_id}.wandb") for _, path in sorted(found)]
        return [p for p in paths if os.path.isfile(p)]


_WANDB_OWN = frozenset({"trainer/global_step", "_step", "_runtime", "_timestamp", "_wandb"})


def _wandb_history(path: str) -> Iterator[tuple[int, int | None, frozenset[str]]]:
    """(row number, ``trainer/global_step`` or None, top-level keys) of each history record, up to a torn one."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # exported by a star import

    keys: dict[frozenset[str], frozenset[str]] = {}
    for data in _leveldb_records(path):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        names: set[str] = set()
        numbers: dict[str, int] = {}
        for item in record.history.item:
            name = item.nested_key[0] if item.nested_key else item.key
            names.add(name)
            if name in ("_step", "trainer/global_step"):
                value = json.loads(item.value_json) if item.value_json else item.integer or item.number
                numbers[name] = int(value)
        row = numbers.get("_step", record.history.step.num)
        columns = frozenset(names - _WANDB_OWN)
        yield row, numbers.get("trainer/global_step"), keys.setdefault(columns, columns)


def _leveldb_records(path: str) -> Iterator[bytes]:
    """Records of a ``.wandb`` file: LevelDB's log format (blocks of 32 KiB, fragments) behind a header of 7 bytes.

    Format: https://github.com/google/leveldb/blob/main/doc/log_format.md, with plain CRC-32 of (type, data).
    Stops silently at the first torn record: a killed writer leaves one.
    """
    block, head = 32768, 7
    with open(path, "rb") as file:
        if file.read(head)[:4] != b":W&B":
            return
        position, parts = head, b""
        while True:
            if (left := block - position % block) < head:
                file.seek(left, os.SEEK_CUR)
                position += left
            header = file.read(head)
            if len(header) < head:
                return
            crc, length, fragment = struct.unpack("<IHB", header)
            body = file.read(length)
            if len(body) < length or zlib.crc32(body, zlib.crc32(header[6:])) != crc:
                return
            position += head + length
            parts = body if fragment in (1, 2) else parts + body  # full, first | middle, last
            if fragment in (1, 4):
                yield parts


def _await_writers(paths: list[str], *, timeout: float) -> None:
    """Wait until no other process of this machine has one of the files open for writing.

    wandb-core notices the death of its rank and then writes what it still held: reading earlier would miss rows that
    appear afterwards, and write them twice.  Waits on process descriptors; elsewhere than on Linux it returns at once.
    """
    deadline = time.monotonic() + timeout
    targets = {os.path.realpath(p) for p in paths}
    while targets and (pids := _writers(targets)):
        if (left := deadline - time.monotonic()) <= 0:
            log.warning("processes %s still write %s after %.0f s: going on without waiting", pids, targets, timeout)
            return
        try:
            fd = os.pidfd_open(pids[0])
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)  # readable: the process has ended
            poll.poll(left * 1000)
        finally:
            os.close(fd)


def _writers(targets: set[str]) -> list[int]:
    """Process IDs, this one's left out, that have one of the files open for writing."""
    pids = []
    for proc in Path("/proc").glob("[0-9]*/fd") if hasattr(os, "pidfd_open") else []:
        pid = int(proc.parent.name)
        if pid == os.getpid():
            continue
        try:
            for fd in os.listdir(proc):
                if os.path.realpath(proc / fd) in targets and os.lstat(proc / fd).st_mode & 0o200:
                    pids.append(pid)
                    break
        except OSError:  # it ended while we looked, or belongs to another user
            continue
    return pids
