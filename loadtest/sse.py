"""Server-sent events, parsed as they come."""

from __future__ import annotations


class EventParser:
    """Turns pieces of a body, cut anywhere, into the data of whole events.

    Comments and fields other than `data` are skipped; several `data` lines of an event are joined.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._begun = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that `piece` completes."""
        buffer = self._rest + piece
        if not self._begun and buffer:
            if len(buffer) < 3 and b"\xef\xbb\xbf".startswith(buffer):
                self._rest = buffer
                return []
            buffer, self._begun = buffer.removeprefix(b"\xef\xbb\xbf"), True
        held = b""
        if b"\r" in buffer:
            if buffer.endswith(b"\r"):  # a line feed may follow
                buffer, held = buffer[:-1], b"\r"
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = buffer.split(b"\n")
        self._rest = rest + held
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
