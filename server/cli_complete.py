"""`dspark complete`: a text in, by argument or standard input, and its continuation out; for scripts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from server.http_client import Client, Refused, Unreachable, add_flags, sampling

_EPILOG = """\
Nothing but the text goes to standard output. Exit codes: 0 done, 1 refused or failed by the server,
2 wrong usage, 3 no server there, 130 interrupted.
"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    prompt = arguments.prompt
    if prompt in (None, "-"):
        if sys.stdin.isatty():
            print("dspark complete: give a PROMPT, or a text on standard input", file=sys.stderr)
            return 2
        prompt = sys.stdin.read()
    try:
        with Client(arguments.url, arguments.api_key) as client:
            _write(client, arguments, prompt)
    except Refused as exc:
        print(f"dspark complete: {exc}", file=sys.stderr)
        return 1
    except Unreachable as exc:
        print(f"dspark complete: no server: {exc}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough, and the interpreter shall not complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _write(client: Client, arguments: argparse.Namespace, prompt: str) -> None:
    body: dict[str, Any] = sampling(arguments)
    body["model"] = arguments.model or client.first_model()
    if arguments.stop:
        body["stop"] = arguments.stop
    chat = arguments.chat or arguments.system is not None
    if chat:
        system = [{"role": "system", "content": arguments.system}] if arguments.system else []
        body["messages"] = [*system, {"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    for event in client.stream("/v1/chat/completions" if chat else "/v1/completions", body):
        for choice in event["choices"]:
            sys.stdout.write((choice["delta"].get("content") or "") if chat else choice["text"])
            sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark complete", description="Continue a text, or answer it with --chat.", epilog=_EPILOG
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: standard input")
    parser.add_argument("--chat", action="store_true", help="as a message to answer, not a text to continue")
    parser.add_argument("--stop", nargs="+", metavar="TEXT", help="end before any of these texts")
    add_flags(parser)
    return parser
