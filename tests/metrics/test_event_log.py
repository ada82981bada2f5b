"""Event log: what is written is read, torn lines are not, and people get sentences."""

import json
import multiprocessing
import time

import pytest

from lightning_cann.metrics.events import EVENTS, EventLog, EventTail, Narrator, check, describe, read_events

SAMPLES = {
    "job_started": ({"world_size": 4, "job_id": "j7", "pid": 10}, "job j7 started with 4 ranks"),
    "member_started": ({"rank": 2, "pid": 99, "member_id": "a.1"}, "rank 2 started (pid 99)"),
    "view_installed": ({"view": 1, "members": [0, 1, 2, 3], "size": 4}, "view 1 installed, 4 members"),
    "member_failed": ({"rank": 2, "cause": "SIGKILL", "view": 1}, "rank 2 died (SIGKILL)"),
    "recovered": ({"view": 2, "members": [0], "latency_s": 0.071}, "view 2, 1 member; recovered in 0.07 s"),
    "member_joined": (
        {"rank": 2, "view": 3, "transfer_s": 0.25},
        "rank 2 joined view 3 (state received in 0.25 s)",
    ),
    "step_redone": ({"view": 2, "step": 57}, "step 57 redone in view 2"),
    "rank_exception": ({"rank": 1, "type": "ValueError", "message": "no"}, "rank 1 raised ValueError: no"),
    "job_stopped": ({"reason": "SIGTERM"}, "job stopped: SIGTERM"),
    "job_finished": ({"steps": 800}, "job finished after 800 steps"),
}


def test_the_samples_cover_the_table():
    assert set(SAMPLES) == {row.name for row in EVENTS}


def test_round_trip(tmp_path):
    before = time.time()
    with EventLog(tmp_path / "new" / "events.jsonl") as log:
        for name, (payload, _) in SAMPLES.items():
            log.write(name, **payload)
    events = read_events(tmp_path / "new" / "events.jsonl")
    assert [event["event"] for event in events] == list(SAMPLES)
    for event in events:
        check(event)
        assert before <= event.pop("time") <= time.time()
        assert event == {"event": event["event"], **SAMPLES[event["event"]][0]}


@pytest.mark.parametrize("name", SAMPLES)
def test_describe(name):
    payload, sentence = SAMPLES[name]
    assert describe({"time": 0.0, "event": name, **payload}) == sentence


def test_describe_special_cases():
    failure = {"event": "member_failed", "rank": 2, "cause": "SIGKILL", "view": 1}
    recovered = {"event": "recovered", "view": 2, "members": [0, 1, 3], "latency_s": 0.07}
    sentence = "rank 2 died (SIGKILL); view 2, 3 members; recovered in 0.07 s"
    assert describe(recovered, failures=[failure]) == sentence
    assert describe({**failure, "cause": "left"}) == "rank 2 left"
    assert describe({"event": "job_finished"}) == "job finished"
    assert describe({"time": 1.0, "event": "of_a_newer_version", "x": 1}) == "of_a_newer_version: x=1"


def test_narrator_tells_a_recovery_once_with_the_longest_latency():
    narrator = Narrator()
    told = [
        narrator.line(event)
        for event in (
            {"event": "view_installed", "view": 1, "members": [0, 1, 2], "size": 3},
            {"event": "recovered", "view": 1, "members": [0, 1, 2], "latency_s": 0.0},
            {"event": "member_failed", "rank": 2, "cause": "SIGKILL", "view": 1},
            {"event": "view_installed", "view": 2, "members": [0, 1], "size": 2},
            {"event": "recovered", "view": 2, "members": [0, 1], "latency_s": 0.07, "rank": 1},
            {"event": "recovered", "view": 2, "members": [0, 1], "latency_s": 0.05, "rank": 0},
        )
    ]
    assert told == [
        "view 1 installed, 3 members",
        None,
        "rank 2 died (SIGKILL)",
        None,
        None,
        "rank 2 died (SIGKILL); view 2, 2 members; recovered in 0.07 s",
    ]


def test_narrator_joins_failures_of_a_broken_recovery():
    narrator = Narrator()
    for event in (
        {"event": "member_failed", "rank": 2, "cause": "SIGKILL", "view": 1},
        {"event": "view_installed", "view": 2, "members": [0, 1], "size": 2},
        {"event": "recovered", "view": 2, "members": [0, 1], "latency_s": 0.07, "rank": 1},
        {"event": "member_failed", "rank": 0, "cause": "exit code 3", "view": 2},
        {"event": "view_installed", "view": 3, "members": [1], "size": 1},
    ):
        narrator.line(event)
    line = narrator.line({"event": "recovered", "view": 3, "members": [1], "latency_s": 0.1, "rank": 1})
    assert line == "rank 2 died (SIGKILL); rank 0 died (exit code 3); view 3, 1 member; recovered in 0.10 s"


@pytest.mark.parametrize(
    "event, message",
    [({"event": "member_faild"}, "unknown event 'member_faild'"), ({"event": "step_redone", "view": 1}, "lacks step")],
)
def test_check_refuses(event, message):
    with pytest.raises(ValueError, match=message):
        check(event)


def test_a_closed_log_refuses(tmp_path):
    log = EventLog(tmp_path / "e.jsonl")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.write("job_finished")


def test_tail_takes_whole_lines_only(tmp_path):
    path = tmp_path / "e.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    line = json.dumps({"time": 1.0, "event": "job_finished"}) + "\n"
    path.write_text(line + line[:10])
    assert len(tail.read()) == 1
    assert tail.read() == []
    with path.open("a") as file:
        file.write(line[10:])
    assert tail.read() == [{"time": 1.0, "event": "job_finished"}]


def test_a_torn_end_is_left_out_and_damage_is_named(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text('{"time": 1.0, "event": "job_finished"}\n{"time": 2.0, "ev')
    assert len(read_events(path)) == 1
    path.write_text('{"time": 1.0, "event": "job_finished"}\n{"time": 2.0, "ev\n')
    with pytest.raises(ValueError, match=r"e\.jsonl:2: not JSON"):
        read_events(path)
    path.write_text('{"rank": 1}\n')
    with pytest.raises(ValueError, match=r"e\.jsonl:1: not an event"):
        read_events(path)
    with pytest.raises(FileNotFoundError, match="no event log"):
        read_events(tmp_path / "none.jsonl")


def _write_many(path, writer):
    with EventLog(path) as log:
        for number in range(300):
            log.write("step_redone", view=writer, step=number, padding="x" * 500)


def test_lines_of_several_writers_do_not_mix(tmp_path):
    path = tmp_path / "e.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, number)) for number in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(30)
        assert process.exitcode == 0
    events = read_events(path)
    for number in range(3):
        assert [event["step"] for event in events if event["view"] == number] == list(range(300))
