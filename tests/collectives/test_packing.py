"""What goes over the wire between members comes out as it went in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cann.collectives.packing import pack, unpack

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn),
]


def travel(value: Any) -> Any:
    header, buffers = pack(value)
    wire = [bytes(buffer) for buffer in buffers]
    received, places = unpack(header)
    assert [len(p) for p in places] == [len(w) for w in wire]
    for place, data in zip(places, wire, strict=True):
        place[:] = data
    return received


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(shape=st.lists(st.integers(0, 4), max_size=3), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_tensors_of_every_dtype_and_shape(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    count = torch.Size(shape).numel()
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2, (count * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    assert same(travel({"x": [tensor]})["x"][0], tensor)


def test_views_parameters_shared_objects_and_plain_values() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(base.clone())
    value = {"t": base.t(), "p": parameter, "a": base, "again": base, "n": None, "s": {1, 2}, "sparse": base.to_sparse()}
    out = travel(value)
    assert same(out["t"], base.t()) and out["a"] is out["again"]
    assert isinstance(out["p"], torch.nn.Parameter) and out["p"].requires_grad and same(out["p"], parameter)
    assert out["n"] is None and out["s"] == {1, 2} and same(out["sparse"].to_dense(), base)


def test_optimizer_state_travels() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    out = travel(optimizer.state_dict())
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(out)
    assert all(same(fresh.state[p]["exp_avg"], optimizer.state[p]["exp_avg"]) for p in model.parameters())
