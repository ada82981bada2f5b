"""The benchmarks' command lines, figures and output format.  Nothing is timed here: the figures are of made-up runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import threading

import pytest
import torch

from benchmarks import _common, _ranks, recovery, step_overhead

MACHINE = {"processor": "p", "cores": 2, "load_average_before": [0.0, 0.0, 0.0]}


@pytest.mark.parametrize("module", [recovery, step_overhead])
def test_help_names_the_options_of_every_benchmark(module, capsys):
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text and "--quick" in text and "--models" in text


def test_an_unknown_model_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as ended:
        step_overhead.main(["--models", "gpt-5"])
    assert ended.value.code == 2
    assert "gpt-1M" in capsys.readouterr().err


def overhead_row(ratio, cpu=1.0):
    return {"model": "gpt-1M", "processes": 2, "pairs": 8, "ratio": ratio, "cpu_ratio": cpu}


def test_step_overhead_prints_one_json_object(monkeypatch, capsys):
    rows = {("gpt-1M", 2): overhead_row(0.98), ("gpt-1M", 4): overhead_row(1.02)}
    monkeypatch.setattr(step_overhead, "measure", lambda model, processes, *rest: rows[model, processes])
    assert step_overhead.main(["--json", "--quick", "--models", "gpt-1M"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    result = json.loads(printed)
    assert set(result) == {"name", "machine", "rows", "summary"}
    assert result["name"] == "step_overhead" and result["machine"]["cores"] >= 1
    assert result["rows"] == [overhead_row(0.98), overhead_row(1.02)]
    assert result["summary"]["worst_median_ratio"] == 1.02
    assert result["summary"]["limit_met"] is True and result["summary"]["goal_met"] is False


def test_step_overhead_prints_a_table_without_json(monkeypatch, capsys):
    monkeypatch.setattr(step_overhead, "measure", lambda *a: overhead_row(1.0))
    assert step_overhead.main(["--quick", "--models", "gpt-1M", "--processes", "2"]) == 0
    text = capsys.readouterr().out
    assert "| model " in text and "worst_median_ratio: 1" in text


def cycles(*recoveries):
    return [{"step": 0.01, "recovery": r, "rejoin": 1.0, "stall": 0.2} for r in recoveries]


def recovery_rows(model="mlp-85k", kill=(0.05, 0.06), torchrun=(8.0,)):
    def row(system, name, found):
        return {"system": system, "model": model, "signal": name, **recovery._statistics(found)}

    return [
        row("cann_ft", "SIGKILL", cycles(*kill)),
        row("cann_ft", "SIGSTOP", cycles(1.05, 1.07)),
        row("torchrun", "SIGKILL", [{"step": 0.01, "recovery": t, "progress": t + 1} for t in torchrun]),
    ]


@pytest.mark.parametrize("torchft", [False, True])
def test_recovery_prints_one_json_object(torchft, monkeypatch, capsys):
    rows = recovery_rows()
    outcome = {"found": [{"step": 0.01, "recovery": 0.2}], "failed": 1}
    monkeypatch.setattr(recovery._torchft, "available", lambda: torchft)
    monkeypatch.setattr(recovery._torchft, "measure_torchft", lambda *a: outcome)
    monkeypatch.setattr(recovery, "measure_ours", lambda *a: rows[:2])
    monkeypatch.setattr(recovery, "measure_torchrun", lambda *a: rows[2])
    assert recovery.main(["--json", "--quick", "--models", "mlp-85k"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [r["system"] for r in result["rows"]] == ["cann_ft", "cann_ft", "torchrun", *["torchft"] * torchft]
    summary = result["summary"]
    assert summary["kill_p50_s"] == pytest.approx(0.055)
    assert summary["freeze_p50_s"] == pytest.approx(1.06)
    assert summary["step_s"] == 0.01 and summary["rejoin_stall_s"] == 0.2
    assert summary["torchrun_kill_p50_s"] == 8.0
    assert summary["speedup_vs_torchrun"] == pytest.approx(8.0 / 0.055)
    assert {"kill_p95_s", "goals_met"} <= set(summary) and summary["goals_met"] is True


@pytest.mark.parametrize(
    ("kill", "torchrun", "met"),
    [
        ((0.05, 0.05), (8.0,), True),
        ((0.2, 0.2), (8.0,), False),
        ((0.05, 0.05, 0.9), (8.0,), False),
        ((0.1, 0.1), (1.0,), False),
    ],
)
def test_goals_need_median_tail_and_speedup(kill, torchrun, met):
    assert recovery.summarize(recovery_rows(kill=kill, torchrun=torchrun))["goals_met"] is met


def test_a_second_model_has_a_suffix_and_must_meet_the_goals_too():
    summary = recovery.summarize(recovery_rows() + recovery_rows("mlp-25M", kill=(0.5, 0.5)))
    assert summary["kill_p50_s"] == pytest.approx(0.055) and summary["kill_p50_s_25m"] == 0.5
    assert summary["goals_met"] is False


def test_a_job_that_died_without_a_cycle_is_no_success():
    rows = [{"system": "cann_ft", "model": "mlp-85k", "signal": "SIGKILL", "failure": "x", **recovery._statistics([])}]
    summary = recovery.summarize(rows)
    assert summary["goals_met"] is False and summary["failures"] == 1
    assert _common._plain(summary)["kill_p50_s"] is None


def test_figures_of_a_cycle_are_those_of_the_slowest_survivor():
    before = [(t / 10, 4) for t in range(90, 101)]  # a step each 0.1 s, the last at 10.0
    quick = [*before, (10.05, 4), (10.3, 5), (10.4, 5), (11.0, 6), (11.1, 6)]  # one more step came before the break
    slow = [*before, (10.5, 5), (10.6, 5), (11.0, 6), (11.1, 6)]
    figures = recovery.cycle_figures({0: quick, 2: slow}, killed_at=10.02, joined_at=11.1, view=4)
    assert figures["recovery"] == pytest.approx(0.48)
    assert figures["rejoin"] == pytest.approx(1.08)
    assert figures["step"] == pytest.approx(0.1)
    assert figures["stall"] == pytest.approx(0.5)  # 10.4 to 11.0


def test_a_survivor_that_never_commits_again_fails_the_run():
    with pytest.raises(recovery.JobFailed, match="rank 2"):
        recovery.cycle_figures({0: [(1.0, 1), (3.0, 2)], 2: [(1.0, 1), (2.1, 1)]}, killed_at=2.0, joined_at=4.0, view=1)


def test_percentiles_interpolate():
    assert _common.percentile([1, 2, 3, 4], 50) == 2.5
    assert _common.percentile([5], 95) == 5
    assert math.isnan(_common.percentile([], 50))


def test_interval_of_the_median_holds_it_and_narrows():
    few, many = _common.median_interval(range(10)), _common.median_interval(range(1000))
    assert few[0] < 4.5 < few[1] and many[0] < 499.5 < many[1]
    assert (many[1] - many[0]) / 1000 < (few[1] - few[0]) / 10


def test_switchboard_carries_messages_and_tells_of_an_end(tmp_path):
    board = _common.Switchboard(str(tmp_path))
    answers = []

    def rank() -> None:
        line = _common.dial(board.path, "job", 3)
        line.send("hello")
        answers.append(line.recv())
        line.close()

    thread = threading.Thread(target=rank)
    thread.start()
    peer, message = board.receive(10)
    assert (peer.job, peer.rank, peer.pid, message) == ("job", 3, os.getpid(), "hello")
    peer.send(7)
    again, end = board.receive(10)
    thread.join()
    assert again is peer and end is None and answers == [7]
    assert board.receive(0) is None
    board.close()


def test_switchboard_fails_when_a_watched_process_has_ended(tmp_path):
    board = _common.Switchboard(str(tmp_path))
    ended = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(ended.pid)
    board.watch(pidfd, "the agent")
    with pytest.raises(_common.JobFailed, match="the agent ended"):
        board.receive(10)
    ended.wait()
    os.close(pidfd)
    board.close()


def test_stamps_are_shared(tmp_path):
    one, other = (_ranks.Stamps(str(tmp_path / "stamps"), 2) for _ in range(2))
    one.write(1, 7, 12.5, 3)
    assert other.latest.tolist() == [0, 7]
    assert (other.time[1, 7], other.view[1, 7]) == (12.5, 3)
    assert not other.stopped(7)
    one.stop[0] = 7
    assert other.stopped(7) and not other.stopped(6)


@pytest.mark.parametrize("name", sorted(recovery.PLAN | step_overhead.PLAN))
def test_models_are_as_large_as_their_names_say(name):
    size = float(name.rpartition("-")[2].translate({ord("k"): "e3", ord("M"): "e6"}))
    with torch.device("meta"):
        module = _ranks.Module(name)
    assert sum(p.numel() for p in module.parameters()) == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize("name", ["mlp-85k", "gpt-1M"])
def test_models_train_on_their_data(name):
    batch = next(iter(_ranks.loader(name, 2, 1)))
    assert len(batch) == _ranks.MODELS[name][2]
    loss = _ranks.Module(name).training_step(batch, 0)
    loss.backward()
    assert loss.ndim == 0 and torch.isfinite(loss)
