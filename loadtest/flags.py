"""The flags that a run and a sweep share; `options` reads them."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from loadtest.lengths import Lengths


def add_shared_flags(parser: argparse.ArgumentParser) -> None:
    """Workload, sampling, measuring and connection."""
    _workload(parser.add_argument_group("What is asked"))
    _sampling(parser.add_argument_group("How it is sampled"))
    _measuring(parser.add_argument_group("How it is measured"))
    _server(parser.add_argument_group("The server"))
    parser.add_argument("--quiet", action="store_true", help="no live table")


def _workload(group: argparse._ArgumentGroup) -> None:
    flag = group.add_argument
    flag("--endpoint", choices=("chat", "completions"), default="chat", help="(default: chat)")
    flag("--prompts", nargs="+", metavar="FILE", default=[], help='JSONL files of "prompt" and "domain"')
    flag("--data", metavar="DIR", help="take every eval_*.jsonl of a folder as --prompts")
    flag("--mix", nargs="+", metavar="DOMAIN=WEIGHT", default=[], help="draw these domains, by weight")
    text = "without prompts: so many words; N, uniform:A,B, normal:MEAN,DEV or lognormal:MEDIAN,SIGMA"
    flag("--input-tokens", type=Lengths.parse, default="64", metavar="LENGTH", help=f"{text} (default: 64)")
    text = "max_tokens of each request, in the same manner (default: 128)"
    flag("--output-tokens", type=Lengths.parse, default="128", metavar="LENGTH", help=text)
    flag("--ignore-eos", action="store_true", help="have every output as long as asked for")
    text = "turns of a conversation; each sends all before it (default: 1)"
    flag("--turns", type=int, default=1, metavar="N", help=text)
    flag("--system", metavar="TEXT|@FILE", help="a system prompt that all share")
    text = "give each conversation one of N system prompts"
    flag("--shared-prefixes", type=int, default=0, metavar="N", help=text)
    text = "words in each of them (default: 256)"
    flag("--prefix-tokens", type=int, default=256, metavar="N", help=text)
    text = "seconds between a user's requests, or between which two bounds (default: 0)"
    flag("--think", default="0", metavar="S[,S]", help=text)
    text = "share of requests that hang up midway"
    flag("--cancel-share", type=float, default=0.0, metavar="P", help=text)
    text = (
        "keep the server from knowing prompts of earlier runs: by a cache_salt, by a first line, or by "
        "asking it to flush (default of a run: keep; of a sweep: salt for our servers, else text, or keep "
        "with a scenario)"
    )
    flag("--prefix-cache", choices=("keep", "salt", "text", "flush"), help=text)
    flag(
        "--scenario",
        metavar="FILE.py",
        help="users with weighted tasks, instead of all above but a cache_salt",
    )


def _sampling(group: argparse._ArgumentGroup) -> None:
    flag = group.add_argument
    flag("--temperature", type=float, metavar="T")
    flag("--top-p", type=float, metavar="P")
    flag("--top-k", type=int, metavar="K")
    flag("--min-p", type=float, metavar="P")
    flag("--seeded", action="store_true", help="send a seed with each request")
    flag("--body", type=_json_object, default={}, metavar="JSON", help="further fields of every request")


def _measuring(group: argparse._ArgumentGroup) -> None:
    flag = group.add_argument
    flag("--cooldown", type=float, default=0.0, metavar="S", help="do not measure the last seconds")
    text = "seconds that requests under way get at the end (default: 60)"
    flag("--drain", type=float, default=60.0, metavar="S", help=text)
    flag("--spawn-rate", type=float, default=10.0, metavar="R", help="users that join a second (default: 10)")
    text = "gaps of an open loop: 1 is Poisson, less is burstier, inf is regular (default: 1)"
    flag("--burstiness", type=float, default=1.0, metavar="B", help=text)
    text = "hold back what would be more requests at once; the wait counts"
    flag("--max-in-flight", type=int, metavar="N", help=text)
    text = "one-token requests a second beside the load"
    flag("--probe-rate", type=float, default=0.0, metavar="R", help=text)
    text = "of arrivals, prompts and lengths (default: 0)"
    flag("--seed", type=int, default=0, metavar="N", help=text)
    text = "processes that make the load (default: 1)"
    flag("--processes", type=int, default=1, metavar="N", help=text)
    text = "seconds between looks at /metrics; 0 is never (default: 2)"
    flag("--scrape-interval", type=float, default=2.0, metavar="S", help=text)
    text = "what a good request keeps: ttft:200 tpot:50 e2e:5000"
    flag("--slo", nargs="+", default=[], metavar="NAME:MS", help=text)
    text = "share of attempted requests that must be good (default: 0.95)"
    flag("--attainment", type=float, default=0.95, metavar="P", help=text)
    flag("--fail-on-slo", action="store_true", help="exit with 3 if fewer are")


def _server(group: argparse._ArgumentGroup) -> None:
    flag = group.add_argument
    flag("--model", metavar="NAME", help="model to ask for (default: the first that it lists)")
    key = os.environ.get("OPENAI_API_KEY")
    flag("--api-key", default=key, metavar="KEY", help="(default: $OPENAI_API_KEY)")
    text = "seconds for a whole reply (default: 300)"
    flag("--timeout", type=float, default=300.0, metavar="S", help=text)


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


_json_object.__name__ = "JSON object"  # how argparse calls it in a message
