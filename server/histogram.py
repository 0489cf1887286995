"""A Prometheus histogram that takes weighted observations at little cost.

The event loop observes several figures a token; the client library's own histogram walks its buckets
under a lock and cannot count one value k times. This one bisects, and runs on the loop's thread only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

SECONDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
ROWS = tuple(float(2**exponent) for exponent in range(15))
LENGTHS = tuple(float(length) for length in range(17))


class Histogram(Collector):
    """Counts observations into buckets whose upper bounds are `bounds`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        documentation: str,
        bounds: Sequence[float],
        labels: Mapping[str, str],
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._labels = dict(labels)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, weight: int = 1) -> None:
        """Count `value`, `weight` times."""
        self._counts[bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """What the registry asks for at every scrape."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip([*map(_bound_text, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self._name, self._documentation, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        return [family]


def _bound_text(bound: float) -> str:
    return str(bound)
