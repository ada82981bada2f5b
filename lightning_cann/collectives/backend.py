"""One small adapter per communication library: create a group, run a collective, wait interruptibly, break the group.

    backend = get_backend("gloo")
    group = backend.create(store, rank, size, connect_timeout, timeout)
    work = backend.all_reduce(group, tensor); backend.wait(work, wake, interrupted)
    backend.destroy(group)

The engine above knows nothing of gloo, NCCL or HCCL.  Every backend must pass the conformance class in
``tests/collectives/test_backend.py``.  NCCL and HCCL are written from their documented interfaces and have not been run
on such devices by this project.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cann.errors import ConfigurationError

__all__ = ["Backend", "get_backend"]

Group = Any
Work = Any

POLL_S = 0.0005  # device backends: how often completion is looked at


class Backend(Protocol):
    name: str
    device_type: str

    def create(self, store: dist.Store, rank: int, size: int, host: str, connect_timeout: timedelta) -> Group:
        """A group of ``size``; blocks until all are connected.  Raises RuntimeError when that fails."""

    def all_reduce(self, group: Group, tensor: Tensor, op: Any, timeout: timedelta) -> Work:
        """Starts the reduction of ``tensor`` in place."""

    def all_gather(self, group: Group, output: list[Tensor], tensor: Tensor, timeout: timedelta) -> Work:
        """Starts the gathering of every member's ``tensor`` (same shapes) into ``output``."""

    def broadcast(self, group: Group, tensor: Tensor, root: int, timeout: timedelta) -> Work:
        """Starts the copy of the root's ``tensor`` to all.  Its completion at one member says nothing of the others."""

    def wait(self, work: Work, wake: threading.Event, interrupted: Callable[[], bool]) -> bool:
        """Waits until ``work`` is complete on the host: True; or until ``interrupted()`` after ``wake`` was set: False.
        Raises RuntimeError when the collective failed."""

    def destroy(self, group: Group) -> None:
        """Drops the group so that its peers notice.  May block while a peer is frozen: call it on a thread of its own."""


class _C10d:
    """Collectives are started in the same way on every c10d process group."""

    def all_reduce(self, group: Group, tensor: Tensor, op: Any, timeout: timedelta) -> Work:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        options.timeout = timeout
        return group.allreduce([tensor], options)

    def all_gather(self, group: Group, output: list[Tensor], tensor: Tensor, timeout: timedelta) -> Work:
        options = dist.distributed_c10d.AllgatherOptions()
        options.timeout = timeout
        return group.allgather([output], [tensor], options)

    def broadcast(self, group: Group, tensor: Tensor, root: int, timeout: timedelta) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = timeout
        return group.broadcast([tensor], options)


class GlooBackend(_C10d):
    """Gloo over TCP.  Dropping a group closes its sockets, which fails the pending collectives of all its peers."""

    name = "gloo"
    device_type = "cpu"

    def create(self, store: dist.Store, rank: int, size: int, host: str, connect_timeout: timedelta) -> Group:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = connect_timeout
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        create_device = dist.ProcessGroupGloo.create_device
        options._devices = [create_device(interface=interface) if interface else create_device(hostname=host)]
        options._threads = 2
        return dist.ProcessGroupGloo(store, rank, size, options)

    def wait(self, work: Work, wake: threading.Event, interrupted: Callable[[], bool]) -> bool:
        # The future completes before the work does, so it alone is asked.
        future = work.get_future()
        if not future.done():
            wake.clear()
            future.add_done_callback(lambda _: wake.set())
            while not future.done():
                if interrupted():
                    return False
                wake.wait()
                wake.clear()
        future.wait()
        return True

    def destroy(self, group: Group) -> None:
        del group  # the last reference: sockets close when its queue has drained


class _DeviceBackend(_C10d):
    """What NCCL and HCCL share: completion is an event on a stream that the host polls, so that it can be interrupted."""

    def wait(self, work: Work, wake: threading.Event, interrupted: Callable[[], bool]) -> bool:
        while not work.is_completed():
            if interrupted():
                return False
            wake.wait(POLL_S)
        work.wait()
        return True


class NcclBackend(_DeviceBackend):
    """NCCL.  Not run by this project."""

    name = "nccl"
    device_type = "cuda"

    def create(self, store: dist.Store, rank: int, size: int, host: str, connect_timeout: timedelta) -> Group:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = connect_timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def destroy(self, group: Group) -> None:
        group.abort()


class HcclBackend(_DeviceBackend):
    """HCCL through torch_npu.  Not run on hardware by this project."""

    name = "hccl"
    device_type = "npu"

    def create(self, store: dist.Store, rank: int, size: int, host: str, connect_timeout: timedelta) -> Group:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options = ProcessGroupHCCL.Options()
        options._timeout = connect_timeout
        return ProcessGroupHCCL(store, rank, size, options)

    def destroy(self, group: Group) -> None:
        group.abort_hccl_comm("view changed")


_BACKENDS: dict[str, type] = {"gloo": GlooBackend, "nccl": NcclBackend, "hccl": HcclBackend}
_BY_DEVICE = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def get_backend(name: str | None, device: torch.device) -> Backend:
    """The backend by name, or (None) the one of the device.  Raises ConfigurationError for an unknown name."""
    chosen = name or _BY_DEVICE.get(device.type, "gloo")
    if chosen not in _BACKENDS:
        raise ConfigurationError(f"process_group_backend={name!r} is not one of {sorted(_BACKENDS)}.")
    backend: Backend = _BACKENDS[chosen]()
    return backend
