"""Numbers and lists as text for people."""

from collections.abc import Sequence

LONG_SECONDS = 99.95  # from here on times are written in minutes and seconds
SHORT_SECONDS = 0.1  # below, they are written in milliseconds
DASH = "\N{EN DASH}"  # for unknown


def format_seconds(seconds: float) -> str:
    """Seconds for people: 0.4 ms, 12.3 s, 4 min 05 s, 2 h 10 min."""
    hours, remainder = divmod(round(seconds), 3600)
    if hours:
        return f"{hours} h {remainder // 60:02d} min"
    if abs(seconds) >= LONG_SECONDS:
        return f"{remainder // 60} min {remainder % 60:02d} s"
    return f"{seconds:.1f} s" if abs(seconds) >= SHORT_SECONDS else f"{seconds * 1000:.1f} ms"


def seconds_text(seconds: float | None) -> str:
    """Format seconds; a dash for unknown."""
    return DASH if seconds is None else format_seconds(seconds)


def number_text(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    """Format a number with its unit; a dash for unknown."""
    return DASH if value is None else format(value, form) + unit


def format_interval(value: float, low: float | None, high: float | None, *, form: str = ".2f") -> str:
    """Format a number with its interval where that is known: 1.50 [1.40, 1.60]."""
    if low is None or high is None:
        return format(value, form)
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def enumerate_words(words: Sequence[str]) -> str:
    """Join words: one, two and three."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
