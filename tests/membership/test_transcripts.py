"""Transcripts of the pure Coordinator: what it is told, and all that it does about it.

``transcripts/*.txt`` hold blocks like etcd raft's data-driven tests: commands, a line ``----``, and the effects that
are expected, one a line, in order.  ``python test_transcripts.py`` writes the answers anew: read the diff.

Commands (``a0``, ``b0``: processes of rank 0; ``node0``: the agent of that node)::

    coordinator world=3 max_failures=1 ...      begin; also: incarnation=1
    hello a0 [fresh=no view=0.2 members=a0,a1 joining=yes stage=1 stopping=why]
    form 3                                      ranks 0..2 say hello and form the first view (effects not shown)
    flush a0 done=5 [fresh=yes]                 answers the proposal that was sent to it last
    broken a0 | left a0 [finished=yes] | error a0 | joinready b0 | joined b0 | stage a0 1 | beat a0
    boundary a0 7 | armed a0 [ok=no] | atboundary a0        answer the attempt that it was asked about last
    eof a0 | reaped a0 [cause=SIGKILL] | agent node0 alive=a0 reaped=a1 finished=a1 | stop node0
    tick 2.5 [beating=a0,a1]                    the clock moves on by so many seconds, 0.4 s a tick; who beats meanwhile
    sleep 10                                    ... in one leap: the coordinator slept
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest

from lightning_cann.membership import messages as m
from lightning_cann.membership.coordinator import Coordinator, CoordinatorSettings, Emit, Send
from lightning_cann.membership.messages import NO_VIEW, MemberInfo, ViewId

TRANSCRIPTS = sorted((pathlib.Path(__file__).parent / "transcripts").glob("*.txt"))
HIDDEN = {"pid", "member_id", "latency_s", "transfer_s", "traceback", "steps"}


def names(ids: Any) -> str:
    return ",".join(ids) or "-"


class Player:
    """Runs the commands of one transcript."""

    def __init__(self) -> None:
        self.now = 0.0
        self.proposed: dict[str, ViewId] = {}
        self.attempts: dict[str, int] = {}

    def run(self, line: str) -> list[str]:
        command, *rest = line.split()
        options = dict(word.split("=", 1) for word in rest if "=" in word)
        words = [word for word in rest if "=" not in word]
        effects = getattr(self, "do_" + command)(*words, **options)
        shown = [self.show(effect) for effect in effects]
        return [] if command == "form" else shown

    # ------------------------------------------------------------------------------------------ effects
    def show(self, effect: Send | Emit) -> str:
        if isinstance(effect, Emit):
            fields = " ".join(f"{k}={v!r}" for k, v in effect.fields.items() if k not in HIDDEN)
            return f"event {effect.event} {fields}".rstrip()
        to, message = effect.to or "agents", effect.message
        if isinstance(message, m.Propose):
            self.proposed[to] = message.view
        if isinstance(message, (m.BoundaryQuery, m.JoinAt)):
            self.attempts[to] = message.attempt
        return f"{to} <- {type(message).__name__} {self.fields(message)}".rstrip()

    @staticmethod
    def fields(message: m.Message) -> str:
        shown = []
        for name in message.__struct_fields__:
            value = getattr(message, name)
            if isinstance(value, ViewId):
                value = f"{value.incarnation}.{value.number}"
            elif name == "members":
                value = names(x.member_id for x in value)
            elif name == "sources":
                value = names(f"{to}:{source}" for to, source in value.items())
            elif isinstance(value, tuple):
                value = names(value)
            elif isinstance(value, bool):
                value = "yes" if value else "no"
            if name in HIDDEN or name == "lease_s" or value in ("", "-", "no"):
                continue
            shown.append(f"{name}={value!r}" if isinstance(value, str) and " " in value else f"{name}={value}")
        return " ".join(shown)

    # ------------------------------------------------------------------------------------------ commands
    def tell(self, sender: str, message: m.Message) -> list[Send | Emit]:
        return self.coordinator.receive(sender, message, self.now)

    def do_coordinator(self, incarnation: str = "0", world: str = "2", **options: str) -> list[Send | Emit]:
        def parse(text: str) -> Any:
            return None if text == "None" else int(text) if text.isdigit() else text

        settings = CoordinatorSettings(
            world_size=int(world), start_timeout_s=8.0, join_timeout_s=5.0, **{k: parse(v) for k, v in options.items()}
        )
        self.coordinator = Coordinator(settings, int(incarnation), self.now)
        return []

    def info(self, member_id: str) -> MemberInfo:
        return MemberInfo(member_id, int(member_id[1:]), "host", 1000, f"node{member_id[1:]}")

    def do_hello(
        self,
        who: str,
        fresh: str = "yes",
        view: str = "",
        members: str = "",
        joining: str = "no",
        stage: str = "0",
        stopping: str = "",
    ) -> list[Send | Emit]:
        number = ViewId(*map(int, view.split("."))) if view else NO_VIEW
        infos = tuple(self.info(x) for x in members.split(",") if x)
        is_fresh, is_joining = fresh == "yes", joining == "yes"
        return self.tell(who, m.Hello(self.info(who), 1, is_fresh, number, infos, int(stage), is_joining, stopping))

    def do_form(self, count: str) -> list[Send | Emit]:
        ids = [f"a{rank}" for rank in range(int(count))]
        effects = [effect for x in ids for effect in self.do_hello(x)]
        for effect in effects:
            self.show(effect)
        effects += [effect for x in ids for effect in self.do_flush(x, done="0", fresh="yes")]
        assert self.coordinator.members == tuple(ids), "the first view did not form"
        return effects

    def do_flush(self, who: str, done: str, fresh: str = "no", view: str = "") -> list[Send | Emit]:
        number = ViewId(*map(int, view.split("."))) if view else self.proposed[who]
        return self.tell(who, m.Flush(number, int(done), fresh == "yes"))

    def do_broken(self, who: str, view: str = "") -> list[Send | Emit]:
        number = ViewId(*map(int, view.split("."))) if view else self.coordinator.view
        return self.tell(who, m.Broken(number, "connection reset"))

    def do_left(self, who: str, finished: str = "no") -> list[Send | Emit]:
        done = finished == "yes"
        return self.tell(who, m.Left("finished" if done else "asked to go", done))

    def do_error(self, who: str) -> list[Send | Emit]:
        return self.tell(who, m.RankError("ValueError", "bad batch", ""))

    def do_joinready(self, who: str, stage: str = "0") -> list[Send | Emit]:
        return self.tell(who, m.JoinReady(int(stage)))

    def do_joined(self, who: str) -> list[Send | Emit]:
        return self.tell(who, m.Joined(self.coordinator.view, 1.0))

    def do_stage(self, who: str, stage: str) -> list[Send | Emit]:
        return self.tell(who, m.StageReached(int(stage)))

    def do_beat(self, who: str) -> list[Send | Emit]:
        return self.tell(who, m.Beat())

    def do_boundary(self, who: str, number: str) -> list[Send | Emit]:
        return self.tell(who, m.Boundary(self.attempts[who], int(number)))

    def do_armed(self, who: str, ok: str = "yes") -> list[Send | Emit]:
        return self.tell(who, m.JoinArmed(self.attempts[who], ok == "yes"))

    def do_atboundary(self, who: str) -> list[Send | Emit]:
        return self.tell(who, m.AtBoundary(self.attempts[who]))

    def do_eof(self, who: str) -> list[Send | Emit]:
        return self.coordinator.disconnected(who, self.now)

    def do_reaped(self, who: str, cause: str = "SIGKILL") -> list[Send | Emit]:
        rank = int(who[1:])
        return self.tell(f"agent:node{rank}", m.Reaped(who, rank, cause.replace("_", " "), True))

    def do_agent(self, node: str, alive: str = "", reaped: str = "", finished: str = "") -> list[Send | Emit]:
        lists = {"alive": alive, "reaped": reaped, "finished": finished}
        ids = {k: tuple(filter(None, v.split(","))) for k, v in lists.items()}
        return self.tell("agent:" + node, m.AgentHello(node, **ids))

    def do_stop(self, node: str) -> list[Send | Emit]:
        return self.tell("agent:" + node, m.StopRequest("SIGTERM"))

    def do_tick(self, seconds: str, beating: str = "") -> list[Send | Emit]:
        effects = []
        end = self.now + float(seconds)
        while self.now < end - 1e-9:
            self.now = min(end, self.now + 0.4)
            for who in filter(None, beating.split(",")):
                effects += self.tell(who, m.Beat())
            effects += self.coordinator.tick(self.now)
        return effects

    def do_sleep(self, seconds: str) -> list[Send | Emit]:
        self.now += float(seconds)
        return self.coordinator.tick(self.now)


def play(text: str) -> str:
    """The transcript with the answers that the coordinator really gives."""
    player = Player()
    out = []
    for block in text.strip("\n").split("\n\n"):
        lines = block.splitlines()
        comments = [line for line in lines if line.startswith("#")]
        end = lines.index("----") if "----" in lines else 0
        commands = [line for line in lines[:end] if not line.startswith("#")]
        out.append("\n".join(comments))
        if commands:
            answers = [answer for command in commands for answer in player.run(command)]
            out[-1] = "\n".join([*comments, *commands, "----", *answers])
    return "\n\n".join(out) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_coordinator_answers_as_written(path: pathlib.Path) -> None:
    text = path.read_text()
    assert play(text) == text


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 12


if __name__ == "__main__":
    for path in TRANSCRIPTS:
        path.write_text(play(path.read_text()))
        sys.stdout.write(f"{path.name}\n")
