"""Takes credentials out of text before it is logged. Pure."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/@\s<>\"']+@")
_SECRET_PARAMETER = re.compile(
    r"(?P<name>(?:password|passwd|secret|token|api_?key|access_?key|signature|sig|credential)[\w-]*)=[^&\s<>\"']+",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Replace the user part of URIs and the values of secret-looking query parameters by `***`."""
    return _SECRET_PARAMETER.sub(r"\g<name>=***", _USER_INFO.sub(r"\g<scheme>***@", text))
