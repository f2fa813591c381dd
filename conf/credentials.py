"""Patterns of credentials inside a text."""

import re

MASK = "***"
NAMES = (
    *("password", "passwd", "passphrase", "secret", "token", "credential", "credentials", "signature"),
    *("api_key", "access_key", "private_key", "account_key", "auth_string", "authorization"),
)
"""Of what is secret. Where `_` stands, there may be `-` or nothing."""
SHORT_NAMES = ("sig", "pwd", "pass", "key")  # names of secret parameters in a URI; words have these letters too


def _either(names: tuple[str, ...]) -> str:
    """A pattern without flags, which the JavaScript of Prefect's form does not have."""
    return "|".join("".join("[_-]?" if sign == "_" else f"[{sign}{sign.upper()}]" for sign in name) for name in names)


_NAME = rf"(?:{_either(NAMES)})(?:[_-][\w-]*|[Ii][Dd]|[Kk]ey)?"
_END = r"\s<>\"'\\"
_PASSWORD = rf"(?!\[)[^/@:{_END}]*:(?!\d{{1,5}}/)[^@{_END}]*"
"""User, colon, password, in which a slash may stand; but host, port and a path with `@` are none."""
_IN_ADDRESS = rf"://{_PASSWORD}@|[Hh][Tt][Tt][Pp][Ss]?://[^/@{_END}]+@"
_SHORT = rf"[?&;](?:{_either(SHORT_NAMES)})"
WITHOUT = rf"^(?![\s\S]*(?:{_IN_ADDRESS}|(?:{_NAME}|{_SHORT})=[^&{_END}]))"
"""A text without the usual credentials, for JSON schemas, so that a form refuses them before they are stored."""

_ADDRESS = re.compile(rf"(?<=://)(?P<user>{_PASSWORD})@")
_WEB_ADDRESS = re.compile(rf"(?:(?<=http://)|(?<=https://))[^/@{_END}]+@", re.IGNORECASE)
_SHORT_PARAMETER = re.compile(rf"(?P<name>{_SHORT}=)[^&{_END}]+")
_PARAMETER = re.compile(rf"(?P<name>{_NAME}=)[^&{_END}]+")
_QUOTE = r"(?:\\?[\"']|&quot;|&#x27;|&#39;)"
_ENTRY = re.compile(
    rf"(?P<name>{_NAME}{_QUOTE}?[ \t]*[:=][ \t]*(?:[Bb]asic[ \t]+|[Bb]earer[ \t]+)?)"
    rf"(?:(?P<quote>{_QUOTE})(?:(?!(?P=quote)).)+(?P=quote)|(?!{_QUOTE}|[{{\[(])[^&{_END},]+)"
)
"""As in YAML, JSON, a header or a program."""
_KNOWN = re.compile(
    r"\b(?:A[KS]IA[0-9A-Z]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|pn[ub]_\w{20,}"
    r"|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)
"""Tokens that say what they are, and keys."""


def mask(text: str) -> str:
    """A text with `***` in place of the credentials in addresses, parameters, entries, and of tokens."""
    text = _SHORT_PARAMETER.sub(rf"\g<name>{MASK}", text)
    text = _KNOWN.sub(MASK, _WEB_ADDRESS.sub(f"{MASK}@", _ADDRESS.sub(f"{MASK}@", text)))
    letters = text.lower().replace("_", "").replace("-", "")
    if any(name.replace("_", "") in letters for name in NAMES):  # saves time on pages of half a megabyte
        text = _PARAMETER.sub(rf"\g<name>{MASK}", text)
        text = _ENTRY.sub(lambda entry: f"{entry['name']}{entry['quote'] or ''}{MASK}{entry['quote'] or ''}", text)
    return text


def holds_credential(text: str) -> bool:
    """Whether `mask` would change a text."""
    return mask(text) != text


def password_of(text: str) -> str | None:
    """The password in the first address of a text that has one."""
    address = _ADDRESS.search(text)
    return address["user"].partition(":")[2] if address else None
