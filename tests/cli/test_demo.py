"""The demo kills one process, once, when training is under way; and it does not call a bad run good."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from lightning_cann.cli import demo
from lightning_cann.cli.demo import CONFIG, _Watch, run_config, verdict
from lightning_cann.cli.report import Run
from lightning_cann.metrics.events import EventLog


@pytest.fixture
def victim():
    """A process that does nothing until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


def write_metrics(watch, *steps):
    watch.metrics.parent.mkdir(exist_ok=True)
    watch.metrics.write_text("epoch,step,train_loss\n" + "".join(f"0,{step},1.0\n" for step in steps))


def test_watch_kills_the_rank_when_its_step_has_come(tmp_path, victim, capsys):
    watch = _Watch(tmp_path, kill_rank=2, kill_step=20)
    with EventLog(watch.log) as log:
        log.write("member_started", rank=2, pid=victim.pid, member_id="m2")
        watch.look()
        assert not watch.killed, "no step is known yet"
        write_metrics(watch, 4, 9)
        watch.look()
        assert not watch.killed, "too early"
        write_metrics(watch, 4, 9, 14, 19, 24)
        watch.look()
        assert victim.wait(10) == -signal.SIGKILL
        log.write("member_failed", rank=2, cause="SIGKILL", view=1)
        log.write("member_started", rank=2, pid=1, member_id="m2b")  # pid 1: a second kill would be refused, or worse
        watch.look()
    assert capsys.readouterr().out.count("kill -9") == 1


def test_watch_reads_no_half_line(tmp_path):
    watch = _Watch(tmp_path, kill_rank=0, kill_step=0)
    assert watch._step() == -1
    write_metrics(watch, 7)
    with watch.metrics.open("a") as file:
        file.write("0,1")  # the writer is at "0,12,..."
    assert watch._step() == 7


def test_config_keeps_everything_in_the_run_folder():
    config = run_config(yaml.safe_load(CONFIG.read_text()), Path("/run"))
    trainer = config["trainer"]
    assert trainer["default_root_dir"] == "/run"
    assert trainer["strategy"]["init_args"]["event_log"] == "/run/events.jsonl"
    assert [one["init_args"]["save_dir"] for one in trainer["logger"]] == ["/run", "/run"]
    assert trainer["callbacks"][0]["init_args"]["dirpath"] == "/run/checkpoints"
    assert "runs/byte_lm" not in yaml.safe_dump(config)


def test_a_training_that_hangs_is_ended(tmp_path, monkeypatch):
    script = [sys.executable, "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(demo, "_command", lambda config: script)
    watch = _Watch(tmp_path, kill_rank=0, kill_step=0)
    code = demo._train(tmp_path / "config.yaml", [], watch, deadline=time.monotonic())
    assert code == -signal.SIGTERM, "the exit code of a child that was waited for"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the handler is put back"


# Stands for `cann-train fit`: two ranks, one of them a process that waits to be killed.
FAKE_TRAINING = """
import json, os, pathlib, subprocess, sys, time
from lightning_cann.metrics.events import EventLog

folder = pathlib.Path(sys.argv[1]).parent
log = EventLog(folder / "events.jsonl")
assert str(log.path) in pathlib.Path(sys.argv[1]).read_text()
victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
log.write("job_started", world_size=2, job_id="fake", pid=os.getpid())
for rank, pid in ((0, os.getpid()), (1, victim.pid)):
    log.write("member_started", rank=rank, pid=pid, member_id=str(rank))
log.write("view_installed", view=1, members=[0, 1], size=2)
(folder / "csv").mkdir()
with (folder / "csv" / "metrics.csv").open("w") as metrics:
    metrics.write("step,train_loss,unix_time\\n")
    for step in range(20):
        metrics.write(f"{step},{5 - step / 10},{time.time()}\\n")
assert victim.wait(30) == -9
victim.stdin.close()
log.write("member_failed", rank=1, cause="SIGKILL", view=1)
log.write("view_installed", view=2, members=[0], size=1)
log.write("recovered", view=2, members=[0], latency_s=0.04, rank=0)
log.write("member_joined", rank=1, view=3, transfer_s=0.01)
audit = {"expected": 40, "consumed": 40, "missing": int(sys.argv[2]), "duplicates": 0}
for rank in range(2):
    result = {"rank": rank, "step": 20, "sha256": "a", "data_audit": {"0": audit}}
    (folder / f"weights-rank{rank}.json").write_text(json.dumps(result))
log.write("job_finished")
"""


@pytest.mark.parametrize("missing", [0, 3])
def test_the_whole_demo_around_a_fake_training(tmp_path, monkeypatch, capsys, missing):
    monkeypatch.setenv("PYTHONPATH", str(CONFIG.parents[1]))
    monkeypatch.setattr(demo, "_command", lambda config: [sys.executable, "-c", FAKE_TRAINING, str(config)])
    arguments = ["--output", str(tmp_path), "--kill-rank", "1", "--kill-step", "19", "--timeout", "30"]
    code = demo.main([*arguments, "--", str(missing)])
    told = capsys.readouterr().out
    (folder,) = tmp_path.iterdir()
    assert code == (1 if missing else 0)
    assert ("NOT as it should be: 3 samples lost" in told) == bool(missing)
    assert "0.040 s (rank 1 died (SIGKILL))" in told
    assert re.search(r"failures survived +1 of 1\n", told)
    assert f"{missing} of 40" in told
    assert "yes (2 of 2 ranks compared)" in told
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


AUDIT = {"expected": 10, "consumed": 10, "missing": 0, "duplicates": 0}


def good_run():
    return Run(
        folder=Path(),
        events=[
            {"time": 0.0, "event": "job_started", "world_size": 2, "job_id": "j", "pid": 1},
            {"time": 1.0, "event": "member_failed", "rank": 1, "cause": "SIGKILL", "view": 1},
            {"time": 1.1, "event": "recovered", "view": 2, "members": [0], "latency_s": 0.1},
            {"time": 9.0, "event": "member_joined", "rank": 1, "view": 3, "transfer_s": 0.1},
        ],
        results=[{"rank": rank, "step": 5, "sha256": "a", "data_audit": {"0": AUDIT}} for rank in range(2)],
    )


def without(name):
    run = good_run()
    run.events = [event for event in run.events if event["event"] != name]
    return run


def with_result(**change):
    run = good_run()
    run.results[1].update(change)
    return run


def test_a_good_run_is_good():
    assert verdict(good_run(), 0) == []


@pytest.mark.parametrize(
    "run, code, problem",
    [
        (good_run(), 3, "exit code 3"),
        (without("member_failed"), 0, "no failure"),
        (without("recovered"), 0, "not recovered"),
        (without("member_joined"), 0, "did not join"),
        (with_result(sha256="b"), 0, "not known to be identical"),
        (with_result(data_audit={"0": AUDIT, "1": {**AUDIT, "missing": 1}}), 0, "1 samples lost"),
        (with_result(data_audit={"0": {**AUDIT, "duplicates": 1}}), 0, "1 seen twice"),
    ],
)
def test_a_bad_run_is_called_bad(run, code, problem):
    assert any(problem in one for one in verdict(run, code))


def test_no_audit_is_no_proof():
    run = good_run()
    for result in run.results:
        result["data_audit"] = None
    assert verdict(run, 0) == ["the samples were not audited"]
