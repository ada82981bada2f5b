"""What is already on disk: one adapter per Lightning logger, used by :mod:`lightning_cann.plugins.logger_relay`.

When the leader dies, its successor must go on in the same run: open the same logs in append mode, find out which
rows the dead process still got onto disk, and write exactly the others.  A :class:`Sink` does that for one logger:

========= ==================================================== =================================================
logger    what counts as written                               how it goes on
========= ==================================================== =================================================
CSV       whole rows of ``metrics.csv`` (a torn last row is    same file, appended (Lightning's own writer would
          cut off)                                             delete it)
TensorBoard scalar events in the event files of the log        a further event file in the same directory
          directory, up to the first torn record
W&B       history records of ``run-<id>.wandb``, up to the     same run ID, ``resume="allow"``; offline that is a
          first torn record                                    second directory, which ``wandb sync`` merges
others    unknown: :class:`Sink` itself, see ``resume``        whatever the logger does when used for the first
                                                               time on this process
========= ==================================================== =================================================

Loggers are recognised by class name and module, so the same code serves ``lightning.pytorch``, ``pytorch_lightning``
and Fabric, and nothing of them is imported here.  This module does not decide *when* something may be written.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["CSVSink", "Sink", "TensorBoardSink", "Unit", "Written", "sink_for"]

log = logging.getLogger(__name__)

Unit = tuple[int, Hashable]  # (step, what is written as a whole at that step: a row's columns, or one tag)


class Written:
    """A multiset of the units that are on disk; every unit can be claimed once.

    Args:
        units: (step, key) of each unit, in the order of the file.
        min_step: units of earlier steps are not needed; None keeps the last ``keep`` units instead.
        keep: bound used when ``min_step`` is None (units).
    """

    def __init__(self, units: Iterable[Unit], *, min_step: int | None = None, keep: int = 2000) -> None:
        rows = list(units)
        self.last_step = max((step for step, _ in rows), default=None)
        rows = rows[-keep:] if min_step is None else [row for row in rows if row[0] >= min_step]
        self.counts: Counter[Unit] = Counter(rows)

    def claim(self, step: int, key: Hashable) -> bool:
        """True if this unit is on disk and was not claimed before; then it must not be written again."""
        if self.counts[step, key] > 0:
            self.counts[step, key] -= 1
            return True
        return False


class Sink:
    """The adapter for a logger that cannot be read back; base of the others.

    Args:
        logger: the Lightning logger of this process.
    """

    kind = "other"
    #: a flush puts rows where even the death of the whole node's processes cannot lose them
    flush_is_durable = True

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.baseline: list[str] = []  # files of earlier runs: their steps say nothing about this one

    def open(self) -> None:
        """First leader: open the logger afresh, as Lightning would."""

    def identity(self) -> dict[str, Any]:
        """What another rank needs to log into the same run (JSON types)."""
        return {}

    def adopt(self, identity: dict[str, Any]) -> None:
        """Take the run of the leader as this logger's own; nothing is opened."""

    def resume(self, *, min_step: int | None, keep: int) -> Written | None:
        """Open the logger in append mode.

        Returns:
            what is on disk, or None if that cannot be known: the relay then writes only what had not become stable.
        """
        return None

    def units(self, metrics: dict[str, Any]) -> dict[Hashable, dict[str, Any]]:
        """Split one ``log_metrics`` call into parts that are written as a whole: {key: those metrics}."""
        return {frozenset(self._names(metrics)): metrics}

    def restore_hyperparams(self, calls: list[tuple[tuple[Any, ...], dict[str, Any]]], log_hyperparams: Any) -> None:
        """After :meth:`resume`: repeat the calls that this rank had skipped.  Loggers overwrite: repeating is safe."""
        for args, kwargs in calls:
            log_hyperparams(*args, **kwargs)

    def flush(self) -> None:
        """Bring what was logged to the operating system, where SIGKILL of this process cannot lose it."""
        type(self.logger).save(self.logger)

    def close(self) -> None:
        """This rank stops being the leader: flush and let go, so that another process can go on."""
        self.flush()

    def _names(self, metrics: dict[str, Any]) -> list[str]:
        prefix, join = getattr(self.logger, "_prefix", ""), getattr(self.logger, "LOGGER_JOIN_CHAR", "-")
        return [f"{prefix}{join}{name}" if prefix else name for name in metrics]


class _VersionedSink(Sink):
    """CSV and TensorBoard: the run is a directory named by the logger's version."""

    def identity(self) -> dict[str, Any]:
        return {"version": self.logger.version, "name": self.logger._name, "baseline": self.baseline}

    def adopt(self, identity: dict[str, Any]) -> None:
        # `_version` None would make every rank scan the directory and find another "next" one
        self.logger._version, self.logger._name = identity["version"], identity["name"]
        self.baseline = list(identity["baseline"])


class CSVSink(_VersionedSink):
    """``CSVLogger``: rows of ``metrics.csv``."""

    kind = "csv"

    def open(self) -> None:
        self.logger._experiment = self.logger._experiment or self._writer(append=False)

    def resume(self, *, min_step: int | None, keep: int) -> Written | None:
        writer = self._writer(append=True)
        self.logger._experiment = writer
        scratch = _scratch(writer.metrics_file_path)
        if writer._fs.exists(scratch):  # the dead process was in the middle of adding a column
            writer._fs.rm_file(scratch)
        if not writer._fs.isfile(writer.metrics_file_path):
            return Written([])
        data = writer._fs.cat_file(writer.metrics_file_path)
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            log.warning("%s ends in a torn row: cut off, %d bytes", writer.metrics_file_path, len(data) - len(whole))
            if not whole:
                writer._fs.rm_file(writer.metrics_file_path)
                return Written([])
            _replace(writer, whole.decode())
        reader = csv.DictReader(io.StringIO(whole.decode(), newline=""))
        rows = list(reader)
        writer.metrics_keys = sorted(reader.fieldnames or [])
        if writer.metrics_keys != list(reader.fieldnames or []):
            # Lightning appends rows in sorted column order, whatever the header says
            writer._rewrite_with_new_header(writer.metrics_keys)
        keys: dict[frozenset[str], frozenset[str]] = {}
        units: list[Unit] = []
        for row in rows:
            if not row.get("step"):
                continue
            columns = frozenset(k for k, v in row.items() if v not in ("", None) and k != "step")
            units.append((int(float(row["step"])), keys.setdefault(columns, columns)))
        return Written(units, min_step=min_step, keep=keep)

    def units(self, metrics: dict[str, Any]) -> dict[Hashable, dict[str, Any]]:
        shown = {k: v for k, v in metrics.items() if v is not None and v != ""}  # csv writes None as nothing
        return {frozenset(set(self._names(shown)) - {"step"}): metrics}

    def close(self) -> None:
        super().close()
        self.logger._experiment = None

    def _writer(self, *, append: bool) -> Any:
        """Lightning's writer of this logger's namespace, which neither deletes nor loses the file."""
        base = next(c for c in type(self.logger).__mro__ if _is(c, "CSVLogger"))
        module = sys.modules[base.__module__]
        writer_class = getattr(module, "ExperimentWriter", None) or module._ExperimentWriter

        def rewrite(self: Any, fieldnames: list[str]) -> None:
            # Lightning truncates the file, then writes it again: a kill in between would lose the whole run
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                rows = list(csv.DictReader(file))
            text = io.StringIO(newline="")
            out = csv.DictWriter(text, fieldnames=fieldnames)
            out.writeheader()
            out.writerows(rows)
            _replace(self, text.getvalue())

        methods: dict[str, Any] = {"_rewrite_with_new_header": rewrite}
        if append:
            methods["_check_log_dir_exists"] = lambda self: None  # it deletes a metrics.csv that is there
        return type(writer_class.__name__, (writer_class,), methods)(log_dir=self.logger.log_dir)


def _scratch(path: str) -> str:
    return f"{path}.rewrite"


def _replace(writer: Any, text: str) -> None:
    """Replace the writer's file in one step, where the file system can rename (a local one does it atomically)."""
    with writer._fs.open(_scratch(writer.metrics_file_path), "w", newline="") as file:
        file.write(text)
    if type(writer._fs).__name__ == "LocalFileSystem":
        os.replace(_scratch(writer.metrics_file_path), writer.metrics_file_path)
    else:
        writer._fs.mv(_scratch(writer.metrics_file_path), writer.metrics_file_path)


class TensorBoardSink(_VersionedSink):
    """``TensorBoardLogger``: scalar events, each (sub-directory, tag, step) on its own."""

    kind = "tensorboard"

    def __init__(self, logger: Any) -> None:
        super().__init__(logger)
        self._hparams_on_disk = False

    def open(self) -> None:
        own = f".{socket.gethostname()}.{os.getpid()}."  # a writer that the user opened before the relay came
        self.baseline = [name for name in self._files() if own not in name]
        _ = self.logger.experiment

    def resume(self, *, min_step: int | None, keep: int) -> Written | None:
        local = type(self.logger._fs).__name__ == "LocalFileSystem"
        units: list[Unit] = []
        self._hparams_on_disk = False
        root = Path(self.logger.log_dir)
        for name in sorted(set(self._files()) - set(self.baseline)) if local else []:
            folder = os.path.dirname(name)
            for event in _tensorboard_events(root / name):
                for value in event.summary.value:
                    units.append((int(event.step), (folder, value.tag)))
                    self._hparams_on_disk |= value.tag == "_hparams_/session_start_info"
        # `purge_step` would make TensorBoard hide what the dead leader wrote after that step
        self.logger._kwargs.pop("purge_step", None)
        self.logger._experiment = None
        _ = self.logger.experiment
        return Written(units, min_step=min_step, keep=keep * 16) if local else None  # a row has several tags

    def units(self, metrics: dict[str, Any]) -> dict[Hashable, dict[str, Any]]:
        units: dict[Hashable, dict[str, Any]] = {}
        for name, (key, value) in zip(self._names(metrics), metrics.items(), strict=True):
            if isinstance(value, dict):  # SummaryWriter.add_scalars: one sub-directory each
                for part, v in value.items():
                    units[f"{name.replace('/', '_')}_{part}", name] = {key: {part: v}}
            else:
                units["", name] = {key: value}
        return units

    def restore_hyperparams(self, calls: list[tuple[tuple[Any, ...], dict[str, Any]]], log_hyperparams: Any) -> None:
        # TensorBoard appends: a second call would show `hp_metric` twice
        if not self._hparams_on_disk:
            super().restore_hyperparams(calls, log_hyperparams)

    def close(self) -> None:
        super().close()
        self.logger.experiment.close()
        self.logger._experiment = None

    def _files(self) -> list[str]:
        root = self.logger.log_dir
        return [
            os.path.relpath(os.path.join(folder, name), root)
            for folder, _, names in os.walk(root)
            for name in names
            if "tfevents" in name
        ]


def _tensorboard_events(path: Path) -> Iterator[Any]:
    """``Event`` messages of one event file, up to the first record that is torn.

    The records are TFRecords: length (uint64), its masked CRC, data, its masked CRC, little-endian.  TensorBoard's own
    reader computes the CRCs in Python, minutes for a long run; a killed writer tears the end only, which lengths show.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        from tensorboardX.proto.event_pb2 import Event
    from google.protobuf.message import DecodeError

    with open(path, "rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            if length > 1 << 31:
                break
            data = file.read(length + 4)
            if len(data) < length + 4:
                break
            try:
                event = Event.FromString(data[:-4])
            except DecodeError:
                break  # nothing behind a damaged record is shown by TensorBoard either
            yield event


def _is(cls: type, name: str) -> bool:
    return cls.__name__ == name and ".loggers." in f"{cls.__module__}."


def sink_for(logger: Any) -> Sink:
    """The adapter for this logger: by the Lightning class that it is or derives from."""
    from lightning_cann.plugins.wandb_sink import WandbSink  # it builds on this module

    for name, sink in (("CSVLogger", CSVSink), ("TensorBoardLogger", TensorBoardSink), ("WandbLogger", WandbSink)):
        if any(_is(cls, name) for cls in type(logger).__mro__):
            return sink(logger)
    return Sink(logger)
