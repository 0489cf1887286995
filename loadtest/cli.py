"""`dspark loadtest`: run, sweep, compare."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_HELP = """\
usage: dspark loadtest COMMAND ...

Load for any OpenAI-compatible server.

  run URL           put load on a server and report what its users see
  sweep CONFIG ...  climb a ladder of loads with one or several configurations; draw SLA curves
  compare A B       two results side by side, with intervals

Exit codes: 0 done, 1 could not measure, 2 wrong flags, 3 an objective was missed (--fail-on-slo).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    try:
        if command == "run":
            from loadtest.run_command import main as run

            return run(rest)
        if command == "sweep":
            from loadtest.sweep_command import main as sweep

            return sweep(rest)
        if command == "compare":
            from loadtest.compare import main as compare

            return compare(rest)
    except KeyboardInterrupt:
        return 130
    if command in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    print(f"dspark loadtest: no such command: {command} (run, sweep or compare)", file=sys.stderr)
    return 2
