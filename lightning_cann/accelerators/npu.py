"""Ascend NPUs as a Lightning accelerator (``Trainer(accelerator="npu")``, and first choice of ``"auto"``).

Needs torch_npu (``pip install lightning-cann[npu]``) and CANN.  Written from torch_npu's documented interface; not run on
hardware by this project.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

from lightning_cann.errors import ConfigurationError

__all__ = ["accelerator_class", "npu_available"]


def npu_available() -> bool:
    """Whether torch_npu is installed and sees a device."""
    if importlib.util.find_spec("torch_npu") is None:
        return False
    importlib.import_module("torch_npu")
    return bool(torch.npu.is_available())  # type: ignore[attr-defined]


class _NPUBody:
    """An Ascend NPU."""

    def setup_device(self, device: torch.device) -> None:
        if device.type != "npu":
            raise ConfigurationError(f"accelerator='npu' was given the device {device}: pass devices as NPU indices.")
        torch.npu.set_device(device)  # type: ignore[attr-defined]

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        return dict(torch.npu.memory_stats(device))  # type: ignore[attr-defined]

    def teardown(self) -> None:
        torch.npu.empty_cache()  # type: ignore[attr-defined]

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Indices of NPUs from ``devices``: a number, "0,3", a list, or -1 for all.  Raises ConfigurationError."""
        count = torch.npu.device_count() if npu_available() else 0  # type: ignore[attr-defined]
        if isinstance(devices, str):
            text = devices.strip()
            chosen = [int(x) for x in text.split(",") if x] if "," in text else int(text)
        else:
            chosen = devices
        if isinstance(chosen, int):
            chosen = list(range(count if chosen == -1 else chosen))
        wrong = [index for index in chosen if not 0 <= index < count]
        if wrong or not chosen:
            raise ConfigurationError(f"devices={devices!r} asks for NPUs {wrong or chosen}, but {count} are visible.")
        return list(chosen)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("npu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return int(torch.npu.device_count()) if npu_available() else 0  # type: ignore[attr-defined]

    @staticmethod
    def is_available() -> bool:
        return npu_available()

    @staticmethod
    def name() -> str:
        return "npu"


@functools.cache
def accelerator_class(namespace: str) -> type:
    """``NPUAccelerator`` for one Lightning namespace."""
    base = importlib.import_module(f"{namespace}.accelerators").Accelerator
    return type("NPUAccelerator", (_NPUBody, base), {"__doc__": _NPUBody.__doc__, "__module__": __name__})
