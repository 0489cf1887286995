"""A ladder of loads for several configurations: every point a run, kept in a file of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.arrivals import OpenLoop
from loadtest.configurations import Configuration, running, serve_command
from loadtest.files import write_text
from loadtest.plan import Plan


class SweepError(RuntimeError):
    """The sweep cannot go on; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured in one go."""

    config: Configuration
    load: float
    seed: int

    @property
    def file(self) -> str:
        return f"{self.config.slug}@{self.load:g}.{self.seed}.json"


@dataclass(frozen=True, slots=True)
class Ladder:
    """Loads to climb: users of a closed loop, or arrivals a second of an open one."""

    loads: tuple[float, ...]
    open_loop: bool
    burstiness: float = 1.0

    def plan(self, template: Plan, load: float, seed: int) -> Plan:
        """The run of one rung; users all join within the warm-up."""
        if self.open_loop:
            return replace(template, users=None, open_loop=OpenLoop(load, None, self.burstiness), seed=seed)
        users = int(load)
        rate = max(template.spawn_rate, 2 * users / template.warmup if template.warmup else float("inf"))
        return replace(template, users=users, spawn_rate=rate, seed=seed)

    @property
    def unit(self) -> str:
        return "requests/s" if self.open_loop else "users"


class Store:
    """The folder of a sweep: its settings, a file a point, so that a sweep that was cut off goes on."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Raises SweepError if the folder holds another sweep."""
        self.folder = folder
        file = folder / "settings.json"
        written = json.loads(json.dumps(settings))
        if file.is_file():
            before = json.loads(file.read_text(encoding="utf-8"))
            names = sorted(before.keys() | written.keys())
            changed = [name for name in names if before.get(name) != written.get(name)]
            if changed:
                raise SweepError(
                    f"{folder} holds a sweep with another {', '.join(changed)}: give another --output"
                )
        write_text(file, json.dumps(settings, indent=2) + "\n")

    def read(self, point: Point) -> dict[str, Any] | None:
        """The result of a point that is done. Raises SweepError if it was of other flags."""
        file = self.folder / "points" / point.file
        if not file.is_file():
            return None
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        config = point.config
        if (kept["config"], kept["url"], kept["flags"]) != (config.name, config.url, list(config.flags)):
            raise SweepError(
                f"{file} is of {kept['config']} at another address or with other flags: remove it"
            )
        result: dict[str, Any] = kept["result"]
        return result

    def write(self, point: Point, result: Mapping[str, Any]) -> None:
        config = point.config
        kept = {
            "config": config.name,
            "url": config.url,
            "flags": list(config.flags),
            "load": point.load,
            "seed": point.seed,
            "result": result,
        }
        write_text(self.folder / "points" / point.file, json.dumps(kept, allow_nan=False) + "\n")


#: measures a point against a URL
Measure = Callable[[Point, str], dict[str, Any]]


def climb(
    configs: Sequence[Configuration],
    ladder: Ladder,
    seeds: Sequence[int],
    store: Store,
    measure: Measure,
    serve_flags: Sequence[str],
    say: Callable[[str], None],
    together: bool = False,
) -> None:
    """Measure every point that is not done: seed by seed, configuration by configuration.

    `together`: all servers run at once and are measured in turns at each rung, which is fairer where the
    machine is not the same from one minute to the next. A saturated rung ends a configuration's ladder:
    above it there is only more of the same.
    """
    alone = [((seed,), (config,)) for seed in seeds for config in configs]
    for some_seeds, group in [(tuple(seeds), tuple(configs))] if together else alone:
        ladders = {
            (config.name, seed): [Point(config, load, seed) for load in sorted(ladder.loads)]
            for seed in some_seeds
            for config in group
        }
        left = {key: points for key, points in ladders.items() if not _done(points, store)}
        with ExitStack() as servers:
            urls = {
                config.name: servers.enter_context(
                    _served(config, serve_flags, store.folder, some_seeds[0], say)
                )
                for config in group
                if any(name == config.name for name, _ in left)
            }
            for rung in zip(*left.values(), strict=True):
                for point in rung:
                    if not _ended(left[point.config.name, point.seed], point, store):
                        _measure(point, urls[point.config.name], ladder, store, measure, say)


def _measure(
    point: Point, url: str, ladder: Ladder, store: Store, measure: Measure, say: Callable[[str], None]
) -> None:
    if store.read(point) is None:
        result = measure(point, url)
        store.write(point, result)
        if is_saturated(result):
            say(f"{point.config.name} is saturated at {point.load:g} {ladder.unit}")


def _ended(points: Sequence[Point], upto: Point, store: Store) -> bool:
    """Whether a rung below `upto` was saturated."""
    below = [store.read(point) for point in points if point.load < upto.load]
    return any(result is not None and is_saturated(result) for result in below)


def _done(points: Sequence[Point], store: Store) -> bool:
    return all(store.read(point) is not None or _ended(points, point, store) for point in points)


def is_saturated(result: Mapping[str, Any]) -> bool:
    """Whether a run was ended because the server fell behind."""
    return (result["cut_short"] or "").startswith("saturated")


def collect(
    configs: Sequence[Configuration], ladder: Ladder, seeds: Sequence[int], store: Store
) -> dict[str, dict[float, list[dict[str, Any]]]]:
    """Results by configuration and load, as far as they are there."""
    found: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for config in configs:
        for load in sorted(ladder.loads):
            kept = [store.read(Point(config, load, seed)) for seed in seeds]
            results = [result for result in kept if result is not None]
            if results:
                found.setdefault(config.name, {})[load] = results
    return found


@contextmanager
def _served(
    config: Configuration, extra: Sequence[str], folder: Path, seed: int, say: Callable[[str], None]
) -> Iterator[str]:
    if config.url is not None:
        yield config.url
        return
    say(f"starting the server: {config.name}")
    with running(serve_command(config, extra), folder / "logs" / f"{config.slug}.{seed}.log") as url:
        yield url
