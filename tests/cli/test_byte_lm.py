"""The example: its data is exact, its model causal, its schedule does what its arguments say."""

import pytest
import torch

from examples.byte_lm import GPT, ByteLM, ByteWindows, StdlibBytes
from examples.byte_lm.callbacks import fingerprint
from examples.byte_lm.data import read_bytes, split_files, stdlib_files


def test_windows_cut_the_text_without_gap_or_overlap():
    text = torch.arange(100, dtype=torch.uint8)
    windows = ByteWindows(text, block_size=9)
    assert len(windows) == 11
    inputs = torch.cat([windows[i][0] for i in range(len(windows))])
    targets = torch.cat([windows[i][1] for i in range(len(windows))])
    assert inputs.tolist() == list(range(99))
    assert targets.tolist() == list(range(1, 100))
    assert inputs.dtype == targets.dtype == torch.int64
    for index in (-1, 11):
        with pytest.raises(IndexError, match="of 11"):
            windows[index]


def test_a_rest_shorter_than_a_window_is_left_out():
    assert len(ByteWindows(torch.zeros(99, dtype=torch.uint8), block_size=9)) == 10
    with pytest.raises(ValueError, match="9 bytes are less than one window of block_size=9"):
        ByteWindows(torch.zeros(9, dtype=torch.uint8), block_size=9)


def test_text_is_the_files_in_order_up_to_the_limit(tmp_path):
    files = [tmp_path / f"{name}.py" for name in "abc"]
    for file in files:
        file.write_bytes(file.stem.encode() * 4)
    assert bytes(read_bytes(files).tolist()) == b"aaaabbbbcccc"
    assert bytes(read_bytes(files, limit=6).tolist()) == b"aaaabb"


def test_the_library_is_real_sorted_and_split_by_file():
    files = stdlib_files()
    assert len(files) > 200
    assert files == sorted(files)
    assert not any({"site-packages", "test"} & set(file.parts[-3:]) for file in files)
    training, validation = split_files(files)
    assert sorted(training + validation) == files
    assert not set(training) & set(validation)
    assert len(validation) == len(files) // 10


def test_a_folder_without_sources_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="pass root="):
        stdlib_files(tmp_path)


def test_loaders_give_batches_of_the_agreed_shape():
    data = StdlibBytes(block_size=16, batch_size=4, train_bytes=1000, val_bytes=500)
    data.setup("fit")
    assert len(data.train_set) == 62
    for loader in (data.train_dataloader(), data.val_dataloader()):
        tokens, targets = next(iter(loader))
        assert tokens.shape == targets.shape == (4, 16)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_default_model_has_a_million_parameters():
    assert 0.9e6 < sum(p.numel() for p in GPT().parameters()) < 1.1e6


@pytest.mark.parametrize("tied", [True, False])
def test_model_is_causal(tied):
    torch.manual_seed(0)
    model = GPT(n_layer=2, n_head=2, n_embd=16, block_size=8, tied=tied).eval()
    assert (model.head.weight is model.tokens.weight) == tied
    text = torch.randint(0, 256, (1, 8))
    other = text.clone()
    other[0, 5] = (other[0, 5] + 1) % 256
    difference = (model(text) - model(other)).abs().amax(dim=-1)[0]
    assert difference[:5].max() == 0
    assert difference[5] > 0 and difference[6] > 0


def test_model_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="n_embd=10 cannot be cut into n_head=4"):
        GPT(n_embd=10, n_head=4)
    with pytest.raises(ValueError, match="9 bytes do not fit into block_size=8"):
        GPT(n_layer=1, n_head=1, n_embd=8, block_size=8)(torch.zeros(1, 9, dtype=torch.int64))


def test_model_learns_a_repeating_text():
    torch.manual_seed(0)
    module = ByteLM(n_layer=1, n_head=2, n_embd=32, block_size=8, lr=1e-2, warmup_steps=1, decay_steps=0)
    optimizer = module.configure_optimizers()["optimizer"]
    tokens = torch.tensor([list(b"abcdabcd")])
    batch = (tokens, tokens.roll(-1, dims=1))
    losses = []
    for _ in range(30):
        loss = module.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 4
    assert losses[-1] < 0.5


def test_schedule_and_decay_groups():
    module = ByteLM(n_layer=1, n_head=1, n_embd=8, lr=1.0, min_lr=0.1, warmup_steps=10, decay_steps=110)
    factors = [module.lr_factor(step) for step in (0, 9, 10, 60, 110, 1000)]
    assert factors == pytest.approx([0.1, 1.0, 1.0, 0.55, 0.1, 0.1])
    assert ByteLM(n_layer=1, n_head=1, n_embd=8, warmup_steps=0, decay_steps=0).lr_factor(10**6) == 1.0
    groups = module.configure_optimizers()["optimizer"].param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert {p.dim() for p in groups[0]["params"]} == {2} and {p.dim() for p in groups[1]["params"]} == {1}
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprint_sees_one_bit(dtype):
    module = GPT(n_layer=1, n_head=1, n_embd=8, block_size=8).to(dtype)
    first = fingerprint(module)
    assert fingerprint(module) == first
    with torch.no_grad():
        module.norm.weight[0] = torch.nextafter(module.norm.weight[0], torch.tensor(2.0, dtype=dtype))
    assert fingerprint(module) != first
