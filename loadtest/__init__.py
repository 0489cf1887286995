"""Load for any OpenAI-compatible server: honest latencies, SLA curves, scenarios in Python.

A scenario file needs these names; everything else is behind `dspark loadtest` (or `python -m loadtest`).
"""

from loadtest.scenario import Reply, User, between, constant, constant_pacing, task

__all__ = ["Reply", "User", "between", "constant", "constant_pacing", "task"]
