"""The service's log: one line an event."""

from __future__ import annotations

import json
import warnings
from datetime import datetime, timezone
from typing import Any, Literal, TextIO, get_args

Form = Literal["json", "text"]
FORMS: tuple[Form, ...] = get_args(Form)
Level = Literal["info", "warning", "error"]


class Log:
    r"""Writes events to a stream: as JSON objects for programs, or as text for people, with the same fields.

    A stream that cannot be written to any more is a warning, and the service goes on without a log.

    Args:
        form: "json" or "text".
        stream: None: nowhere, as of a process without standard output.

    Example:
        >>> import io
        >>> stream = io.StringIO()
        >>> Log("text", stream)("stop", reason="SIGTERM", waiting=0)
        >>> stream.getvalue().split(" ", 1)[1]
        'info stop reason=SIGTERM waiting=0\n'
    """

    def __init__(self, form: Form, stream: TextIO | None) -> None:
        self._form, self._stream = form, stream

    def __call__(self, event: str, *, level: Level = "info", **fields: Any) -> None:
        """Write an event of now."""
        if self._stream is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if self._form == "json":
            line = json.dumps({"time": now, "level": level, "event": event, **fields})
        else:
            line = " ".join([now, level, event, *(f"{name}={_plain(value)}" for name, value in fields.items())])
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError) as error:  # nobody reads it any more, the disk is full, or it is closed
            self._stream = None
            warnings.warn(f"the log cannot be written, the service goes on without it: {error}", stacklevel=2)


def _plain(value: Any) -> str:
    """A value without quotes where it needs none."""
    text = value if isinstance(value, str) else json.dumps(value)
    return (
        text
        if text and not set(text) & set(' "=\n\r\t') and text.isprintable() and text.isascii()
        else json.dumps(value)
    )
