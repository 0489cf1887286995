"""The `dspark` command. Nothing heavy is imported before it is needed: help and version answer at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_SERVE_EPILOG = """\
Every setting may also come from the environment (--max-num-seqs as DSPARK_MAX_NUM_SEQS; lists separated by
spaces or commas) or from the file named by --config (max-num-seqs: 32). A flag beats the environment, which
beats the file.
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is one --help away."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["chat"]:
        from server.cli_chat import main as chat

        return chat(arguments[1:])
    if arguments[:1] == ["complete"]:
        from server.cli_complete import main as complete

        return complete(arguments[1:])
    if arguments[:1] == ["bench"]:
        from server.bench import main as bench

        return bench(arguments[1:]) or 0
    if arguments[:1] == ["accuracy"]:
        from server.accuracy import main as accuracy

        return accuracy(arguments[1:])
    if arguments[:1] == ["eval"]:
        from server.evaluate import main as evaluate

        return evaluate(arguments[1:])
    if arguments[:2] == ["data", "regenerate"]:
        from server.regenerate import main as regenerate

        return regenerate(arguments[2:])
    if arguments[:1] in (["train"], ["data"]):
        from drafters.training.cli import main as train

        return train(arguments)
    if arguments[:1] == ["calibrate"]:
        from server.calibrate import main as calibrate

        return calibrate(arguments[1:])
    if arguments[:1] == ["profile"]:
        from server.costs import main as profile

        return profile(arguments[1:])
    if arguments[:1] == ["loadtest"]:
        from loadtest.cli import main as loadtest

        return loadtest(arguments[1:])
    if arguments[:1] == ["export"]:
        from drafters.export import main as export

        return export(arguments[1:])
    wanted = _parser(with_flags=arguments[:1] == ["serve"]).parse_args(arguments)
    if wanted.command == "version":
        return _version()
    if wanted.command == "serve":
        return _serve({name: value for name, value in vars(wanted).items() if name != "command"})
    _parser(with_flags=False).print_help()
    return 0


def _parser(with_flags: bool) -> argparse.ArgumentParser:
    parser = _Parser(prog="dspark", description="An LLM inference server with DSpark speculative decoding.")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    serve = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve MODEL over an OpenAI-compatible HTTP API.",
        epilog=_SERVE_EPILOG,
        usage="dspark serve [MODEL] [options]",
        allow_abbrev=False,
    )
    serve.set_defaults(command="serve")
    if with_flags:
        from server.options import add_flags

        add_flags(serve)
    commands.add_parser("chat", help="talk to a server in the terminal", add_help=False)
    commands.add_parser("complete", help="continue a text from an argument or standard input", add_help=False)
    commands.add_parser("bench", help="measure the engine on this machine, without HTTP", add_help=False)
    commands.add_parser(
        "accuracy", help="compare the executor's distributions with fp32's on a text", add_help=False
    )
    commands.add_parser("train", help="train a drafter for a model", add_help=False)
    commands.add_parser("eval", help="judge a drafter on benchmark prompts", add_help=False)
    commands.add_parser("calibrate", help="mend the drafter's confidence on held-out prompts", add_help=False)
    commands.add_parser("profile", help="show what a step costs on this machine", add_help=False)
    commands.add_parser("export", help="write a draft model for other engines", add_help=False)
    commands.add_parser("loadtest", help="put load on a server; SLA curves", add_help=False)
    commands.add_parser("data", help="prepare what training needs", add_help=False)
    version = commands.add_parser("version", help="print the versions that matter")
    version.set_defaults(command="version")
    return parser


def _version() -> int:
    from server.versions import versions

    for name, version in versions().items():
        print(f"{name} {version}")
    return 0


def _serve(flags: dict[str, Any]) -> int:
    from server.options import SettingsError, load

    try:
        settings = load(flags)
    except SettingsError as exc:
        print(f"dspark serve: {exc}", file=sys.stderr)
        return 2
    from server.process import run
    from server.startup import StartError

    def build(*args: Any) -> Any:
        # On the loading thread, so that probes are answered while this imports.
        from server.wiring import build_engine

        return build_engine(*args)

    try:
        return run(settings, build)
    except StartError as exc:
        print(f"dspark serve: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
