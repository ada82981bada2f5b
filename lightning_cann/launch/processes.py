"""How an agent starts rank processes: by re-running the script, or by spawning a function."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lightning_cann.launch.child import die_with_parent

__all__ = ["CommandStarter", "FunctionStarter", "Starter", "script_command"]


class Starter(Protocol):
    """Starts one rank process with these additional environment variables; returns its pid.  ``reap`` after its end."""

    def start(self, environment: Mapping[str, str]) -> int: ...

    def reap(self, pid: int) -> int:
        """The exit code, negative for a signal (the process has ended)."""


def script_command() -> list[str]:
    """The command line that runs this script again, as the interpreter was started (``python x.py``, ``python -m x``)."""
    import __main__

    spec = getattr(__main__, "__spec__", None)
    if spec is None:
        return [sys.executable, *_interpreter_flags(), os.path.abspath(sys.argv[0]), *sys.argv[1:]]
    name = spec.name.removesuffix(".__main__") if spec.name != "__main__" else spec.name
    return [sys.executable, *_interpreter_flags(), "-m", name, *sys.argv[1:]]


def _interpreter_flags() -> list[str]:
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]  # as multiprocessing does


class CommandStarter:
    """Runs a command line per rank, through the shim of :mod:`.child`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "lightning_cann.launch.child", *command]
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, environment: Mapping[str, str]) -> int:
        env = {**os.environ, **environment, "CANN_FT_AGENT_PID": str(os.getpid())}
        # A session of its own: Ctrl-C in the terminal reaches the agent alone, which ends the job in order.
        child = subprocess.Popen(self._command, env=env, start_new_session=True)
        self._children[child.pid] = child
        return child.pid

    def reap(self, pid: int) -> int:
        return self._children.pop(pid).wait()


def _called(environment: dict[str, str], forked: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setsid()
    die_with_parent()
    os.environ.update(environment)
    if forked:
        atexit._clear()  # the fork server's
    from lightning_cann.launch.runtime import Runtime

    try:
        function(*args)
    except BaseException as error:
        if (runtime := Runtime.current()) is not None and not (isinstance(error, SystemExit) and not error.code):
            runtime.failed = runtime.failed or f"raised {type(error).__name__}"
        raise
    finally:
        # multiprocessing ends its children without this: the farewell to the job, loggers that flush at exit
        atexit._run_exitfuncs()


class FunctionStarter:
    """Calls ``function(*args)``, both picklable, in a new process per rank.

    Args:
        method: ``"spawn"``: a fresh interpreter each time.  ``"forkserver"``: forked from a process that has imported
            ``preload`` and never computed anything; replacements are there in a fraction of a second.
        preload: modules that the fork server imports.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        method: str = "spawn",
        preload: Sequence[str] = (),
    ) -> None:
        self._function, self._args = function, args
        self._context: Any = multiprocessing.get_context(method)
        self._forked = method == "forkserver"
        if self._forked:
            self._context.set_forkserver_preload(list(preload))
        self._children: dict[int, Any] = {}

    def start(self, environment: Mapping[str, str]) -> int:
        child = self._context.Process(target=_called, args=(dict(environment), self._forked, self._function, self._args))
        # The environment must be there before the child's imports: rank-aware libraries read it at import.
        before = {key: os.environ.get(key) for key in environment}
        os.environ.update(environment)
        try:
            child.start()
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value
        pid: int = child.pid
        self._children[pid] = child
        return pid

    def reap(self, pid: int) -> int:
        child = self._children.pop(pid)
        child.join()
        code: int = child.exitcode
        child.close()
        return code
