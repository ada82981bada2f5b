"""``cann-train`` from outside: light where it can be, Lightning's CLI where it must be, clear when it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_cann.cli.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "byte_lm.yaml")


def cann_train(*arguments, cwd=ROOT):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "lightning_cann.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_help_and_version_import_nothing_heavy():
    code = (
        "import sys; from lightning_cann.cli.__main__ import main; "
        "assert main(['--help']) == main(['--version']) == main([]) == 0; "
        "print({'torch', 'lightning'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "fit | validate | test | predict" in result.stdout
    assert result.stdout.splitlines()[-1] == "set()"


def test_unknown_command(capsys):
    assert main(["train"]) == 2
    assert "unknown command 'train': `cann-train --help` lists the commands" in capsys.readouterr().err


def test_print_config_keeps_what_the_file_says():
    result = cann_train("fit", "--config", CONFIG, "--trainer.max_epochs", "8", "--print_config")
    assert result.returncode == 0, result.stderr
    config = yaml.safe_load(result.stdout)
    assert config["trainer"]["max_epochs"] == 8
    strategy = yaml.safe_load(Path(CONFIG).read_text())["trainer"]["strategy"]
    assert config["trainer"]["strategy"]["class_path"] == strategy["class_path"]
    assert config["trainer"]["strategy"]["init_args"].items() >= strategy["init_args"].items()
    assert config["model"]["class_path"] == "examples.byte_lm.ByteLM"
    assert "repeat" not in result.stderr and "args parameter" not in result.stderr


def test_fit_help():
    result = cann_train("fit", "--help")
    assert result.returncode == 0, result.stderr
    assert "--trainer.strategy" in result.stdout
    assert "--ckpt_path" in result.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--config", "nope.yaml"], "File does not exist"),
        (["--config", CONFIG, "--model.n_layers", "3"], "'n_layers' is not accepted"),
        (["--config", CONFIG, "--trainer.strategy", "cann_tf"], "trainer.strategy='cann_tf' is no strategy: use"),
    ],
)
def test_wrong_config_is_named(arguments, message):
    result = cann_train("fit", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_fit_trains_a_class_of_the_current_directory(tmp_path):
    """The whole way on one process, with a model file that lies only in the working directory."""
    (tmp_path / "mine.py").write_text(
        "from examples.byte_lm import ByteLM\n\n\nclass Mine(ByteLM):\n    '''A model of the user.'''\n"
    )
    (tmp_path / "lib").mkdir()
    for number in range(10):
        (tmp_path / "lib" / f"f{number}.py").write_text("x = 1\n" * 40)
    config = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "strategy": "auto",
            "max_steps": 3,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "default_root_dir": str(tmp_path / "out"),
            "callbacks": [{"class_path": "examples.byte_lm.WriteResult"}],
        },
        "model": {"class_path": "mine.Mine", "init_args": {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8}},
        "data": {
            "class_path": "examples.byte_lm.StdlibBytes",
            "init_args": {"block_size": 8, "batch_size": 2, "root": str(tmp_path / "lib")},
        },
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    result = cann_train("fit", "--config", "mine.yaml", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load((tmp_path / "out" / "weights-rank0.json").read_text())["step"] == 3
