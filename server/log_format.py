"""Log lines as JSON objects, one a line: what log collectors read without a pattern."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonFormatter(logging.Formatter):
    """time (UTC), level, logger, message, what a record carries as `fields`, a traceback as `exception`.

    A record with `fields` (the access log has them) is told by them alone.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **({"message": record.getMessage()} if fields is None else fields),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def formatter(kind: str) -> logging.Formatter:
    """For --log-format `kind`."""
    return JsonFormatter() if kind == "json" else logging.Formatter(TEXT, "%H:%M:%S")
