"""Numbers as text for people."""

from __future__ import annotations

LONG_SECONDS = 99.95
"""From here on times are written in minutes and seconds."""
SHORT_SECONDS = 0.1
"""Below, they are written in milliseconds."""


def format_seconds(seconds: float) -> str:
    """Seconds for people: 0.4 ms, 12.3 s, 4 min 05 s, 2 h 10 min."""
    hours, remainder = divmod(round(seconds), 3600)
    if hours:
        return f"{hours} h {remainder // 60:02d} min"
    if abs(seconds) >= LONG_SECONDS:
        return f"{remainder // 60} min {remainder % 60:02d} s"
    return f"{seconds:.1f} s" if abs(seconds) >= SHORT_SECONDS else f"{seconds * 1000:.1f} ms"
