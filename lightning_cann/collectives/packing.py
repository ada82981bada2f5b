"""Any picklable value as a small header and the raw memory of its tensors: nothing is copied on the way to the socket.

    header, buffers = pack(value)            # send the header, then each buffer
    value, buffers = unpack(header)          # receive each buffer into its place, then use the value

Dense contiguous CPU tensors travel beside the pickle; all other objects, tensor subclasses included, inside it.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        plain = type(obj) is Tensor and obj.layout is torch.strided and obj.device.type == "cpu"
        if not (plain and obj.is_contiguous() and not obj.requires_grad and not obj.is_quantized):
            return None
        if obj.is_conj() or obj.is_neg():
            return None
        if id(obj) not in self._index:  # an object that is met twice stays one object
            self._index[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._index[id(obj)], tuple(obj.shape), obj.dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        index, shape, dtype = pid
        if index not in self.tensors:
            self.tensors[index] = torch.empty(shape, dtype=dtype)
        return self.tensors[index]


def pack(value: Any) -> tuple[bytes, list[memoryview]]:
    """Header and buffers of ``value``.  The buffers are the tensors' own memory: they must not change till they are sent."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), [_memory(tensor) for tensor in pickler.tensors]


def unpack(header: bytes | memoryview) -> tuple[Any, list[memoryview]]:
    """The value, its tensors still empty, and their memory in the order of :func:`pack`, to be filled."""
    unpickler = _Unpickler(io.BytesIO(header))
    value = unpickler.load()
    return value, [_memory(unpickler.tensors[i]) for i in sorted(unpickler.tensors)]
