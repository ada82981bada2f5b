"""How the strategy is found and configured: by name without any import of ours, in both namespaces, with checked arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_cann
from lightning_cann._autoload import autoload
from lightning_cann.errors import ConfigurationError
from lightning_cann.settings import FaultToleranceSettings
from lightning_cann.strategies.factory import strategy_class
from lightning_cann.strategies.registration import NAMES
from tests.lightning_face.sides import Observed
from tests.support.job import record, run_job
from tests.support.training import Regression, loader, quiet_trainer, weights_hash

ROOT = Path(__file__).parents[2]
NAMESPACES = ["lightning.pytorch", "pytorch_lightning"]

SCRIPT = """
import sys
import {namespace} as pl
import os
import torch
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = pl.Trainer(strategy="cann_ft", accelerator="cpu", devices=2, max_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4))
    # one write: both ranks share this stdout
    os.write(1, b"rank %d of %d did %d steps\\n" % (trainer.global_rank, trainer.world_size, trainer.global_step))
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("CANN_FT_", "HCCL_FT_"))}
    return subprocess.run(
        [sys.executable, *arguments], env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=170, cwd=ROOT,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- by name
@pytest.mark.slow
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_script_that_imports_nothing_of_ours_trains_by_name(tmp_path: Path, namespace: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(namespace=namespace))
    done = python(str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank ")) == [
        f"rank {rank} of 2 did 2 steps" for rank in range(2)
    ]


AUTOLOAD_OFF = """
import lightning_cann, sys
import {namespace} as pl
from {namespace}.strategies import StrategyRegistry
assert "cann_ft" in StrategyRegistry
strategy = pl.Trainer(strategy="cann_ft", accelerator="cpu", devices=2, logger=False).strategy
print(*(base.__module__ for base in type(strategy).__mro__ if base.__name__ == "DDPStrategy"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_without_torchs_autoloading_an_import_is_enough(namespace: str) -> None:
    done = python("-c", AUTOLOAD_OFF.format(namespace=namespace), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == f"{namespace}.strategies.ddp"


def test_importing_the_package_imports_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_cann, lightning_cann._autoload as a; a.autoload(); a.autoload();"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'numpy', 'msgspec'} & set(sys.modules);"
        "finders = [f for f in sys.meta_path if type(f).__module__.startswith('lightning_cann')];"
        "print(sorted(heavy), len(finders))"
    )
    assert python("-c", code).stdout.strip() == "[] 1"


def test_the_entry_point_is_the_light_hook() -> None:
    from importlib.metadata import entry_points

    found = [e for e in entry_points(group="torch.backends") if e.name == "lightning_cann"]
    assert {e.value for e in found} == {"lightning_cann._autoload:autoload"}


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_registering_twice_is_harmless(namespace: str) -> None:
    import importlib

    registry = importlib.import_module(f"{namespace}.strategies").StrategyRegistry
    autoload()
    before = dict(registry)
    autoload()
    assert dict(registry) == before
    assert set(NAMES) <= set(registry)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_each_namespace_has_a_strategy_that_its_trainer_takes(namespace: str) -> None:
    import importlib

    pl = importlib.import_module(namespace)
    cls = strategy_class(namespace)
    assert cls is strategy_class(namespace)
    for strategy in ("cann_ft", cls(max_failures=1)):
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
        assert type(trainer.strategy) is cls
        assert (trainer.world_size, trainer.global_rank) == (2, 0)


def test_the_names_with_arguments_set_them() -> None:
    for name, arguments in NAMES.items():
        strategy = quiet_trainer(strategy=name, devices=2).strategy
        for key, value in arguments.items():
            assert getattr(strategy.settings, key) == value


def test_the_package_gives_the_strategy_and_refuses_other_names() -> None:
    assert lightning_cann.FaultTolerantStrategy is strategy_class("lightning.pytorch")
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        lightning_cann.Nothing  # noqa: B018


# ---------------------------------------------------------------------------------------------- arguments
GIVEN = {
    "max_failures": 5, "min_members": 2, "lease_s": 1.5, "replace": False, "max_restarts": 2,
    "on_rank_exception": "replace", "start_method": "spawn", "process_group_backend": "gloo",
    "find_unused_parameters": True, "bucket_cap_mb": 2.0, "broadcast_buffers": False, "divergence_every_n_steps": 7,
    "collective_timeout_s": 9.0, "start_timeout_s": 8.0, "join_timeout_s": 7.0, "event_log": "x.jsonl", "audit": True,
}  # fmt: skip


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_argument_reaches_the_settings(namespace: str) -> None:
    settings = strategy_class(namespace)(**GIVEN).settings
    assert {name: getattr(settings, name) for name in GIVEN} == GIVEN
    assert set(GIVEN) == set(FaultToleranceSettings.__dataclass_fields__)


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("arguments", [{"max_failure": 1}, {"gradient_as_bucket_view": True}])
def test_an_unknown_argument_is_a_type_error(namespace: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(arguments))):
        strategy_class(namespace)(**arguments)


def test_arguments_have_names() -> None:
    with pytest.raises(TypeError):
        strategy_class("lightning.pytorch")(3)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_failures": -1}, r"max_failures=-1"),
    ({"max_failures": "many"}, r"max_failures='many'"),
    ({"min_members": 0}, r"min_members=0"),
    ({"lease_s": 0}, r"lease_s=0"),
    ({"lease_s": -2.0}, r"lease_s=-2"),
    ({"start_method": "x"}, r"start_method='x'"),
    ({"on_rank_exception": "x"}, r"on_rank_exception='x'"),
    ({"divergence_every_n_steps": -1}, r"divergence_every_n_steps=-1"),
    ({"bucket_cap_mb": -1.0}, r"bucket_cap_mb=-1"),
    ({"max_restarts": -1}, r"max_restarts=-1"),
    ({"collective_timeout_s": 0}, r"collective_timeout_s=0"),
    ({"start_timeout_s": 0}, r"start_timeout_s=0"),
    ({"join_timeout_s": 0}, r"join_timeout_s=0"),
    ({"process_group_backend": "smoke signals"}, r"process_group_backend='smoke signals'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda x: str(x))
def test_a_bad_value_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        strategy_class("lightning.pytorch")(**arguments)


def test_more_members_than_ranks_are_refused_before_anything_starts() -> None:
    trainer = quiet_trainer(strategy=strategy_class("lightning.pytorch")(min_members=3, start_method="spawn"), devices=2)
    with pytest.raises(ConfigurationError, match="min_members=3"):
        trainer.fit(Regression(), loader(8))


def test_the_environment_gives_max_failures_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = strategy_class("lightning.pytorch")
    assert cls().settings.resolved_max_failures() == 3
    monkeypatch.setenv("HCCL_FT_MAX_FAILURES", "7")
    assert cls().settings.resolved_max_failures() == 7
    assert cls(max_failures=1).settings.resolved_max_failures() == 1
    assert cls(max_failures=None).settings.resolved_max_failures() is None
    monkeypatch.setenv("HCCL_FT_MAX_FAILURES", "abc")
    with pytest.raises(ConfigurationError, match="HCCL_FT_MAX_FAILURES='abc'"):
        cls()


@pytest.mark.parametrize("name", ["cann_ft", "cann_ft_spawn", "cann_ft_find_unused_parameters_true"])
def test_recovery_turned_off_by_the_environment_gives_lightnings_ddp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    monkeypatch.setenv("HCCL_FT_ENABLE", "0")
    strategy = quiet_trainer(strategy=name, devices=2).strategy
    assert type(strategy) is DDPStrategy
    assert "recovery is off" in caplog.text
    assert strategy._start_method == ("spawn" if name == "cann_ft_spawn" else "popen")
    assert strategy._ddp_kwargs.get("find_unused_parameters", False) == name.endswith("parameters_true")
    monkeypatch.setenv("HCCL_FT_ENABLE", "maybe")
    with pytest.raises(ConfigurationError, match="HCCL_FT_ENABLE='maybe'"):
        strategy_class("lightning.pytorch")()


# ---------------------------------------------------------------------------------------------- refusals
class Synchronised(Regression):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.norm = torch.nn.SyncBatchNorm(8) if inside else torch.nn.BatchNorm1d(8)


def _fit_refused(inside: bool) -> None:
    trainer = quiet_trainer(sync_batchnorm=not inside)
    with pytest.raises(ConfigurationError, match="SyncBatchNorm is not supported") as caught:
        trainer.fit(Synchronised(inside), loader(16))
    record((trainer.global_step, str(caught.value)))


@pytest.mark.parametrize("inside", [False, True])
def test_sync_batch_norm_is_refused_before_training(inside: bool) -> None:
    result = run_job(_fit_refused, 2, (inside,))
    assert result.code
    for step, message in result.values.values():
        assert step == 0 and ("norm" if inside else "sync_batchnorm=True") in message


# ---------------------------------------------------------------------------------------------- the spawn launcher
class Fails(Observed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ZeroDivisionError("the user's own")

    def configure_optimizers(self) -> Any:
        return None


class FailsEarly(Regression):
    def setup(self, stage: str) -> None:
        raise LookupError("before training")


def spawned(**options: Any) -> Any:
    return quiet_trainer(strategy="cann_ft_spawn", devices=2, **options)


@pytest.mark.slow
def test_a_spawned_fit_brings_weights_metrics_and_the_best_path_back(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    model = Regression()
    before = weights_hash(model)
    saver = ModelCheckpoint(tmp_path, monitor="val_loss")
    trainer = spawned(enable_checkpointing=True, callbacks=[saver])
    trainer.fit(model, loader(16), loader(8))
    assert trainer.state.finished
    assert set(trainer.callback_metrics) >= {"train_loss", "val_loss"}
    assert Path(saver.best_model_path).is_file()
    best = torch.load(saver.best_model_path, weights_only=True)["state_dict"]
    assert weights_hash(model) != before
    assert all(torch.equal(best[name], value) for name, value in model.state_dict().items())
    (results,) = trainer.validate(model, loader(8), verbose=False)
    assert results["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "error", "text"), [(Fails, ZeroDivisionError, "own"), (FailsEarly, LookupError, "before")])
def test_an_exception_of_the_users_code_comes_out_of_a_spawned_fit(model: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        spawned().fit(model(), loader(16))
