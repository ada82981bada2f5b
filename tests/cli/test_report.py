"""The report says what a run recorded, and nothing that it did not."""

import csv
import json
import subprocess
import sys

import pytest

from lightning_cann.cli.report import main, read_run, table
from lightning_cann.errors import ConfigurationError

T0 = 1_790_000_000.0
HASH = "ab" * 32


def event(seconds, name, **payload):
    return {"time": T0 + seconds, "event": name, **payload}


EVENTS = [
    event(0, "job_started", world_size=4, job_id="j", pid=1),
    *(event(1, "member_started", rank=rank, pid=100 + rank, member_id=f"m{rank}") for rank in range(4)),
    event(2, "view_installed", view=1, members=[0, 1, 2, 3], size=4),
    event(12.05, "member_failed", rank=2, cause="SIGKILL", view=1),
    event(12.1, "view_installed", view=2, members=[0, 1, 3], size=3),
    *(
        event(12.11 + rank / 100, "recovered", view=2, members=[0, 1, 3], latency_s=0.07 + rank / 1000, rank=rank)
        for rank in (0, 1, 3)
    ),
    event(20, "view_installed", view=3, members=[0, 1, 2, 3], size=4),
    *(event(20.1, "recovered", view=3, members=[0, 1, 2, 3], latency_s=0.5, rank=rank) for rank in (0, 1, 3)),
    event(20.25, "member_joined", rank=2, view=3, transfer_s=0.12),
    event(32, "job_finished"),
]


@pytest.fixture
def folder(tmp_path):
    """A run of 30 seconds, ten steps a second, logged every fifth step."""
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in EVENTS))
    (tmp_path / "csv").mkdir()
    with (tmp_path / "csv" / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["epoch", "step", "train_loss", "unix_time", "val_loss"])
        writer.writeheader()
        for step in range(4, 300, 5):
            writer.writerow({"step": step, "unix_time": T0 + 2 + step / 10})
            writer.writerow({"step": step, "epoch": 0, "train_loss": 5 - step / 100})
        writer.writerow({"step": 299, "epoch": 0, "val_loss": 2.5})
    for rank in range(4):
        write_result(tmp_path, rank)
    return tmp_path


def write_result(folder, rank, **change):
    audit = {epoch: {"expected": 3200, "consumed": 3200, "duplicates": 0, "missing": 0} for epoch in "01"}
    result = {"rank": rank, "pid": rank, "step": 300, "sha256": HASH, "data_audit": audit}
    (folder / f"weights-rank{rank}.json").write_text(json.dumps({**result, **change}))


def rows(run):
    """The table as label -> value."""
    return dict(line.strip().split("  ", 1) for line in table(run).splitlines())


def test_table_of_a_good_run(folder):
    run = read_run(folder / "events.jsonl")
    found = {label: value.strip() for label, value in rows(run).items()}
    assert found == {
        "ranks": "4",
        "optimizer steps": "300",
        "failures survived": "1 of 1",
        "recovery, view 2": "0.073 s (rank 2 died (SIGKILL))",
        "replacement": "rank 2 joined view 3 (state received in 0.12 s), 8.2 s after the failure",
        "samples lost": "0 of 6400",
        "samples seen twice": "0",
        "weights identical": "yes (4 of 4 ranks compared)",
        "train_loss": "4.960 -> 2.010",
        "val_loss": "2.500 -> 2.500",
    }


def test_a_differing_or_missing_rank_is_not_identical(folder):
    write_result(folder, 3, sha256="cd" * 32)
    assert read_run(folder / "events.jsonl").weights_identical() is False
    (folder / "weights-rank3.json").unlink()
    run = read_run(folder / "events.jsonl")
    assert run.weights_identical() is False
    assert "NO (3 of 4 ranks compared)" in table(run)


def test_the_worst_audit_counts(folder):
    first = {"expected": 3200, "consumed": 3198, "missing": 3, "duplicates": 1}
    second = {"expected": 3200, "consumed": 3200, "missing": 0, "duplicates": 0}
    write_result(folder, 1, data_audit={"0": first, "1": second})
    assert read_run(folder / "events.jsonl").audit() == {
        "expected": 6400,
        "consumed": 6398,
        "missing": 3,
        "duplicates": 1,
    }


def test_world_size_of_a_log_that_does_not_say_it(folder):
    log = folder / "events.jsonl"
    log.write_text("".join(json.dumps(one) + "\n" for one in EVENTS if one["event"] != "job_started"))
    assert read_run(log).world_size() == 4


def test_what_was_not_recorded_is_called_so(tmp_path):
    log = tmp_path / "events.jsonl"
    log.write_text(json.dumps(event(1, "member_failed", rank=0, cause="exit code 3", view=1)) + "\n")
    text = table(read_run(log))
    assert "failures survived  0 of 1" in text
    assert "not audited" in text
    assert "weights identical  not recorded" in text
    assert "optimizer steps    not recorded" in text


def test_events_find_their_step(folder):
    run = read_run(folder / "events.jsonl")
    assert run.step_at(T0 + 12.05) == pytest.approx(100.5)
    assert run.step_at(T0) == 4
    assert run.step_at(T0 + 1e6) == 299


def test_command_draws_a_picture(folder, capsys):
    assert main([str(folder / "events.jsonl")]) == 0
    picture = folder / "loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in capsys.readouterr().out


def test_wrong_paths_are_named(folder):
    with pytest.raises(ConfigurationError, match=r"no event log at .*nope"):
        main([str(folder / "nope.jsonl")])
    with pytest.raises(ConfigurationError, match=r"--metrics .*no such file"):
        main([str(folder / "events.jsonl"), "--metrics", str(folder / "nope.csv")])


def test_the_command_needs_neither_torch_nor_lightning(folder):
    code = (
        "import sys; from lightning_cann.cli.__main__ import main; "
        f"assert main(['report', {str(folder / 'events.jsonl')!r}]) == 0; "
        "print({'torch', 'lightning'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "set()"
