"""What a server of ours says of itself on /metrics, for benchmarks that watch it from outside."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Figures:
    """One look at /metrics."""

    def __init__(self, url: str) -> None:
        text = httpx.get(f"{url}/metrics", timeout=30.0).text
        families = text_string_to_metric_families(text)
        self._samples = [sample for family in families for sample in family.samples]

    def get(self, name: str, **labels: str) -> float:
        """All samples of a metric that have these labels, summed; our names go without their prefix."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name in (name, f"dspark:{name}") and labels.items() <= sample.labels.items()
        )

    @property
    def memory(self) -> float:
        """Resident, in MiB."""
        return self.get("process_resident_memory_bytes") / 2**20

    @property
    def files(self) -> int:
        """Open file descriptors."""
        return int(self.get("process_open_fds"))

    @property
    def tasks(self) -> int:
        """On the event loop."""
        return int(self.get("asyncio_tasks"))

    @property
    def busy(self) -> int:
        """Sequences that run or wait."""
        return int(self.get("num_requests_running") + self.get("num_requests_waiting"))

    @property
    def leaked_pages(self) -> int:
        """Of the KV cache, once nothing runs: neither free nor cached."""
        return int(self.get("kv_pages_total") - self.get("kv_pages_free") - self.get("kv_pages_cached"))
