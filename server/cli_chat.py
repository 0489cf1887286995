"""`dspark chat`: talk to a server in the terminal, and see how fast it is and how its drafts fare."""

from __future__ import annotations

import argparse
import unicodedata
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from server.http_client import Client, Refused, Unreachable, add_flags, sampling

_HELP = "/reset forgets the conversation, /system TEXT begins another with that instruction, /exit leaves"


def main(argv: Sequence[str], console: Console | None = None) -> int:
    """Returns the exit code: 0, 1 if the server refuses, 3 if there is none."""
    parser = argparse.ArgumentParser(
        prog="dspark chat", description="Talk to a server.", epilog=f"In the conversation: {_HELP}."
    )
    add_flags(parser)
    arguments = parser.parse_args(argv)
    console = console or Console(highlight=False)
    try:
        with Client(arguments.url, arguments.api_key) as client:
            fields = {"model": arguments.model or client.first_model()} | sampling(arguments)
            console.print(Text(f"{fields['model']} at {arguments.url}; {_HELP}", "dim"))
            _converse(Conversation(client, console, fields, arguments.system), console)
    except (Unreachable, Refused) as exc:
        console.print(Text(f"dspark chat: {exc}", "red"))
        return 1 if isinstance(exc, Refused) else 3
    return 0


def _converse(conversation: Conversation, console: Console) -> None:
    while True:
        try:
            line = console.input(Text("> ", "bold")).strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line == "/exit":
            return
        conversation.enter(line)


class Conversation:
    """The turns so far; what is asked and answered is printed as it comes."""

    def __init__(
        self, client: Client, console: Console, fields: dict[str, Any], system: str | None = None
    ) -> None:
        self._client = client
        self._console = console
        self._fields = fields
        self._reset(system)

    def enter(self, line: str) -> None:
        """A line from the user: a command, a question, or nothing."""
        command, _, rest = line.partition(" ")
        if command == "/reset":
            self._reset(self._system)
        elif command == "/system":
            self._reset(rest or None)
        elif command.startswith("/"):
            self._console.print(Text(_HELP, "dim"))
        elif line:
            self._ask(line)

    def _reset(self, system: str | None) -> None:
        self._system = system
        self._turns = [{"role": "system", "content": system}] if system else []

    def _ask(self, question: str) -> None:
        """Print an answer. Ctrl+C ends it early, and what was said stays said."""
        turns = [*self._turns, {"role": "user", "content": question}]
        wanted = {"stream_options": {"include_usage": True}, "return_metrics": True, "messages": turns}
        answer, last = "", {}
        events = self._client.stream("/v1/chat/completions", self._fields | wanted)
        try:
            for event in events:
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    answer += piece
                    self._console.out(harmless(piece), end="", highlight=False)
                last = event
        except KeyboardInterrupt:
            events.close()
        except (Refused, Unreachable) as exc:
            self._console.print(Text(f"\n{exc}", "red"))
            return
        self._turns = [*turns, {"role": "assistant", "content": answer}]
        self._console.print()
        if figures := summary(last):
            self._console.print(Text(figures, "dim"))


def harmless(text: str) -> str:
    """`text` without control characters: a model must not steer the terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")


def summary(last: dict[str, Any]) -> str:
    """What the last event of a stream tells of speed and drafts; "" if it tells nothing."""
    usage = last.get("usage")
    if not usage:
        return ""
    tokens = usage["completion_tokens"]
    parts = [f"{tokens} tokens"]
    metrics = last.get("metrics") or {}
    seconds = (metrics.get("generation_time_ms") or 0.0) / 1000
    if seconds and tokens > 1:
        parts.append(f"{(tokens - 1) / seconds:.0f} tokens/s")
    if metrics.get("time_to_first_token_ms") is not None:
        parts.append(f"the first after {metrics['time_to_first_token_ms'] / 1000:.2f} s")
    drafts = metrics.get("speculative_decoding") or {}
    if drafts.get("num_spec_steps"):
        parts.append(
            f"accepted length {drafts['mean_acceptance_length']:.2f} where drafts were verified "
            f"({drafts['num_accepted_draft_tokens']} of {drafts['num_draft_tokens']})"
        )
    elif metrics:
        parts.append("no drafts")
    return ", ".join(parts)
