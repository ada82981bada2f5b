"""Benchmarks of the engine against its peers: ``python -m benchmarks.NAME [--json] [--quick]``.

* :mod:`.step_overhead`: what fault tolerance costs while nobody fails, against Lightning's ``ddp``.
* :mod:`.recovery`: from a SIGKILL or SIGSTOP to the survivors' next committed step, against a torchrun restart.

Each starts real processes on this machine, prints a table, or with ``--json`` one object
``{"name", "machine", "rows": [...], "summary": {...}}`` on stdout; progress goes to stderr.
"""
