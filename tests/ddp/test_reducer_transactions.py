"""The reducer's transaction, errors and layouts, in one process against a transport that plays the other members."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cann.ddp import GradientReducer, StepOutcome, StepTransaction
from lightning_cann.ddp.buckets import BucketCaps, BucketLayout, pack, unpack
from lightning_cann.errors import Excluded, FaultToleranceError

CAP_MB = 0.001


class Done:
    """A reduction that is over."""

    def wait(self) -> bool:
        return True


class Twin:
    """A view of two members whose gradients are equal: the sum doubles.  ``script`` may replace ``commit``."""

    def __init__(self, script: Callable[[StepTransaction], StepOutcome | None] | None = None) -> None:
        self.script, self.is_eager, self.members = script, True, 2
        self.refuse_at: int | None = None
        self.sent: list[Tensor] = []

    def eager(self) -> bool:
        return self.is_eager

    def size(self) -> int:
        return self.members

    def all_reduce(self, flat: Tensor) -> Any:
        if len(self.sent) == self.refuse_at:
            return None
        assert flat.numel() > 0
        self.sent.append(flat)
        flat.mul_(self.members)
        return Done()

    def commit(self, step: StepTransaction) -> StepOutcome:
        outcome = self.script(step) if self.script else None
        if outcome is None:
            works = step.pending()
            if works is None:
                works = step.launch(self)
            assert len(works) == len(step.results())
            outcome = StepOutcome(contributors=self.members, members=self.members)
        return outcome


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(11, 11) for _ in range(5)))


def local_gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(module(x).square().mean(), list(module.parameters())))


def check(module: nn.Module, expected: list[Tensor], factor: float = 1.0) -> None:
    for p, g in zip(module.parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, g * factor, rtol=1e-6, atol=1e-8)


X = torch.randn(4, 11, generator=torch.Generator().manual_seed(5))


def test_redo_uses_new_buffers_and_the_new_size() -> None:
    module = model()
    old: list[Tensor] = []

    def script(step: StepTransaction) -> None:
        works = step.pending()
        assert works is not None and len(works) == len(step.results()) > 2
        old[:] = step.results()
        for flat in old:
            flat.fill_(float("nan"))
        transport.members = 5  # the next view has another size
        step.launch(transport)
        assert not {f.data_ptr() for f in old} & {f.data_ptr() for f in step.results()}
        for flat in old:
            flat.fill_(-3)  # an abandoned reduction still writes
        assert step.pending() is None
        transport.script = None

    transport = Twin(script)
    reducer = GradientReducer(module.named_parameters(), transport, bucket_cap_mb=CAP_MB)
    reducer.load_state_dict({**reducer.state_dict(), "order": reducer.last_ready_order})
    expected = local_gradients(module, X)
    for _ in range(3):
        module(X).square().mean().backward()
        check(module, expected)
        module.zero_grad()


def test_refused_launch_voids_the_step_and_is_redone() -> None:
    module, transport = model(), Twin()
    reducer = GradientReducer(module.named_parameters(), transport, bucket_cap_mb=CAP_MB)
    reducer.rebuild(reducer.last_ready_order)
    transport.refuse_at = 2
    expected = local_gradients(module, X)

    def script(step: StepTransaction) -> None:
        assert len(transport.sent) == 2
        assert step.pending() is None
        assert len(step.launch(transport)) == 0  # still broken
        transport.refuse_at = None

    transport.script = script
    module(X).square().mean().backward()
    check(module, expected)


@pytest.mark.parametrize("error", [FaultToleranceError("too few"), Excluded("suspected"), KeyboardInterrupt()])
def test_gradients_are_untouched_when_commit_raises(error: BaseException) -> None:
    module = model()

    def script(step: StepTransaction) -> None:
        for flat in step.results():
            flat.fill_(9)
        raise error

    transport = Twin(script)
    reducer = GradientReducer(module.named_parameters(), transport, bucket_cap_mb=CAP_MB)
    expected = local_gradients(module, X)
    with pytest.raises(type(error)):
        module(X).square().mean().backward()
    for p, g in zip(module.parameters(), expected, strict=True):
        assert p.grad is not None and torch.equal(p.grad, g)
    module.zero_grad()
    transport.script = None
    module(X).square().mean().backward()  # the reducer is usable again
    check(module, expected)
    assert reducer.needs_rebuild()


def test_served_result_is_loaded_and_corrected_once() -> None:
    module, served = model(), []
    transport = Twin()
    reducer = GradientReducer(module.named_parameters(), transport, bucket_cap_mb=CAP_MB)
    module(X).square().mean().backward()
    served = [r.clone() for r in reducer.results()]
    expected = local_gradients(module, X)
    module.zero_grad()

    def script(step: StepTransaction) -> StepOutcome:
        for flat in step.results():
            flat.zero_()
        with pytest.raises(ValueError, match="does not fit"):
            step.load(served[:-1])
        step.load(served)
        return StepOutcome(contributors=1, members=4)

    transport.script = script
    module(X + 1).square().mean().backward()
    check(module, expected, factor=4)
    for kept, sent in zip(reducer.results(), served, strict=True):
        assert torch.equal(kept, sent)  # as reduced, without the correction


@pytest.mark.parametrize("retain", [True, False])
def test_last_result_survives_the_next_fill(retain: bool) -> None:
    module, transport = model(), Twin()
    reducer = GradientReducer(module.named_parameters(), transport, bucket_cap_mb=CAP_MB, retain=retain)
    addresses = []
    for step in range(4):
        kept = reducer.results()
        before = [r.clone() for r in kept]
        module(X * (step + 1)).square().mean().backward()
        assert bool(kept) == (retain and step > 0)
        for now, then in zip(kept, before, strict=True):
            assert torch.equal(now, then)
        addresses.append(transport.sent[-1].data_ptr())
    assert len(set(addresses)) == (2 if retain else 1)
    assert addresses[0] == addresses[2]


def test_not_contributing_sends_zeros_without_a_backward() -> None:
    module, transport = model(), Twin(lambda step: check_zero(step))

    def check_zero(step: StepTransaction) -> StepOutcome:
        assert step.pending() is None
        step.launch(transport)
        assert all(not r.any() for r in step.results())
        return StepOutcome(contributors=1, members=2)

    reducer = GradientReducer(module.named_parameters(), transport, bucket_cap_mb=CAP_MB)
    with pytest.raises(RuntimeError, match="contributing=False"):
        reducer.finalize()
    reducer.contributing = False
    reducer.finalize()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())
    assert sorted(reducer.last_ready_order) == list(range(10))
    with pytest.raises(ValueError, match="contributors=0"):
        StepOutcome(contributors=0, members=2)


def test_missing_gradient_names_parameters_and_way_out() -> None:
    module = model()
    reducer = GradientReducer(module.named_parameters(), Twin(), bucket_cap_mb=CAP_MB)
    with pytest.raises(RuntimeError, match=r"8 of 10 .*0\.weight, 0\.bias.* and 3 more.*cann_ft_find_unused") as raised:
        module[4](X).sum().backward()
    assert "find_unused_parameters=True" in str(raised.value)
    expected = torch.autograd.grad(module[4](X).sum(), module[4].weight)[0]
    assert torch.equal(module[4].weight.grad, expected)
    module.zero_grad()
    expected_all = local_gradients(module, X)
    with reducer.guard():
        module(X).square().mean().backward()
    check(module, expected_all)


def test_sparse_gradient_is_refused_by_name() -> None:
    module = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))
    GradientReducer(module.named_parameters(), Twin())
    with pytest.raises(RuntimeError, match=r"'0\.weight' has a sparse gradient.*sparse=False"):
        module(torch.tensor([1, 2])).sum().backward()


def test_a_backward_that_raises_half_way() -> None:
    module, transport = model(), Twin()
    reducer = GradientReducer(module.named_parameters(), transport, bucket_cap_mb=CAP_MB)
    expected = local_gradients(module, X)

    def broken(_: Tensor) -> None:
        raise ArithmeticError("half-way")

    for guarded in (True, False):
        hidden = module[:3](X)
        hidden.register_hook(broken)
        with pytest.raises(ArithmeticError):
            if guarded:
                with reducer.guard():
                    module[3:](hidden).square().mean().backward()
            else:
                module[3:](hidden).square().mean().backward()
        module.zero_grad()
        if not guarded:  # without it the next backward says so, instead of mixing two backwards
            with pytest.raises(RuntimeError, match=r"became ready twice.*reset"):
                module(X).square().mean().backward()
            module.zero_grad()
        module(X).square().mean().backward()
        check(module, expected)
        module.zero_grad()


class AllCheckpointed(nn.Module):
    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.layers = model()
        self.unused = nn.Linear(2, 2) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.square().mean()


def test_nested_backwards_complete() -> None:
    module = AllCheckpointed(unused=False)
    reducer = GradientReducer(module.named_parameters(), Twin(), bucket_cap_mb=CAP_MB)
    expected = local_gradients(module.layers, X)
    module(X).backward()  # the last nested backward brings the last gradient: no complete() needed
    check(module.layers, expected)
    reducer.remove()
    module = AllCheckpointed(unused=True)
    transport = Twin()
    reducer = GradientReducer(module.named_parameters(), transport, bucket_cap_mb=CAP_MB, find_unused_parameters=True)
    with reducer.guard():
        module(X).backward()
    check(module.layers, expected)
    assert module.unused is not None and module.unused.weight.grad is None
    reducer.remove()
    module.zero_grad()
    reducer = GradientReducer(module.named_parameters(), transport, bucket_cap_mb=CAP_MB)
    with pytest.raises(RuntimeError, match=r"unused\.weight, unused\.bias"):
        with reducer.guard():
            module(X).backward()


def test_create_graph() -> None:
    module = model()
    GradientReducer(module.named_parameters(), Twin(), bucket_cap_mb=CAP_MB)
    expected = local_gradients(module, X)
    module(X).square().mean().backward(create_graph=True)
    check(module, expected)
    for p in module.parameters():
        p.grad = None  # breaks the cycle between parameters and their gradients' graph


def test_state_dict_brings_the_layout_to_a_newcomer() -> None:
    first, second = model(), model()
    a = GradientReducer(first.named_parameters(), Twin(), bucket_cap_mb=CAP_MB)
    assert not a.needs_rebuild()
    first(X).square().mean().backward()
    assert a.needs_rebuild() and a.last_ready_order != list(range(10))
    a.rebuild(a.last_ready_order)
    b = GradientReducer(second.named_parameters(), Twin())
    b.load_state_dict(a.state_dict())
    assert not b.needs_rebuild()
    assert [x.params for x in a.layout.buckets] == [x.params for x in b.layout.buckets]
    other = GradientReducer(nn.Linear(3, 3).named_parameters(), Twin())
    with pytest.raises(ValueError, match="for 10 parameters"):
        other.load_state_dict(a.state_dict())
    unused = GradientReducer(second.named_parameters(), Twin(), find_unused_parameters=True)
    with pytest.raises(ValueError, match="find_unused_parameters=True here"):
        unused.load_state_dict(a.state_dict())
    with pytest.raises(ValueError, match="permutation"):
        a.rebuild([0, 0, 1])


def test_remove_leaves_nothing_behind() -> None:
    module = model()
    for _ in range(2):
        reducer = GradientReducer(module.named_parameters(), Twin(), bucket_cap_mb=CAP_MB)
        module(X).square().mean().backward()
        reference = weakref.ref(reducer)
        reducer.remove()
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
        del reducer
        gc.collect()
        assert reference() is None
        module.zero_grad()
    expected = local_gradients(module, X)
    module(X).square().mean().backward()
    check(module, expected)


def test_complex_and_non_dense_parameters() -> None:
    module = nn.Module()
    module.complex = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
    module.expanded = nn.Parameter(torch.randn(1, 4).expand(3, 4))
    transport = Twin()
    GradientReducer(module.named_parameters(), transport)
    (module.complex.abs().sum() + (module.expanded * torch.arange(4.0)).sum()).backward()
    assert sorted(str(t.dtype) for t in transport.sent) == ["torch.float32", "torch.float32"]
    assert torch.equal(module.expanded.grad, torch.arange(4.0).expand(3, 4))
    torch.testing.assert_close(module.complex.grad, torch.sgn(module.complex.detach()))


def test_layout_covers_every_element_once() -> None:
    shapes = [(3,), (700, 700), (5, 5), (300_000,), (1,), (64, 1024), (64, 1024), (2, 2)]
    params = [nn.Parameter(torch.empty(s, dtype=torch.float64 if i == 2 else None)) for i, s in enumerate(shapes)]
    for order in (None, [7, 2, 0, 5, 6, 4, 3, 1]):
        layout = BucketLayout(params, caps=BucketCaps(first=600_000, cap=10**6), order=order)
        assert sorted(i for b in layout.buckets for i in b.params) == list(range(8))
        for b in layout.buckets:
            ends = [o + params[i].numel() for o, i in zip(b.offsets, b.params, strict=True)]
            assert list(b.offsets) == [0, *ends[:-1]] and ends[-1] == b.numel
            assert [i for s in b.segments for i in layout.segments[s].params] == list(b.params)
            bounds = [(layout.segments[s].start, layout.segments[s].stop) for s in b.segments]
            assert [lo for lo, _ in bounds] == [0, *(hi for _, hi in bounds[:-1])] and bounds[-1][1] == b.numel
    with pytest.raises(ValueError, match="bucket_cap_mb=0"):
        BucketCaps.from_mb(0)


def test_pack_and_unpack() -> None:
    tensors = [torch.arange(3.0), torch.tensor(4), torch.ones(2, 2)]
    flats = pack(tensors)
    assert [f.tolist() for f in flats] == [[0, 1, 2, 1, 1, 1, 1], [4]]
    unpack([f * 2 for f in flats], tensors)
    assert tensors[0].tolist() == [0, 2, 4] and tensors[1].item() == 8 and tensors[2].tolist() == [[2, 2], [2, 2]]
    with pytest.raises(ValueError, match="do not fit"):
        unpack(flats[:1], tensors)
