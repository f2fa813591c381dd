"""Takes credentials out of text before it is logged, shown or stored: what looks like one, and what is one here.

Secrets of this process are the values of variables such as AWS_SECRET_ACCESS_KEY or MLFLOW_TRACKING_PASSWORD. They are
found in any text, whatever stands around them, unless they are as short and plain as words.
"""

import inspect
import logging
import os
import re
import traceback
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar
from urllib.parse import quote

from paceline.conf.credentials import MASK, mask, password_of
from paceline.tasks.errors import RunError
from paceline.tasks.log_lines import stage_label

_SECRET_VARIABLE = re.compile(
    r"PASSW(?:OR)?D|PASSPHRASE|SECRET|TOKEN|CREDENTIAL|AUTH_STRING|(?:API|ACCESS|PRIVATE|ACCOUNT)_?KEY", re.IGNORECASE
)
MIN_SECRET, MIN_PLAIN_SECRET = 7, 16
"""Characters of a secret value; of one that is letters alone, and could be a word in any text."""

Plain = TypeVar("Plain")
Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


def redact(text: str) -> str:
    """Replace credentials by `***`."""
    secrets = _pattern(tuple(os.environ.items()))
    return mask(text if secrets is None else secrets.sub(MASK, text))


def redact_tree(tree: Plain) -> Plain:
    """Redact every text in a tree of dicts, lists and plain values."""
    if isinstance(tree, str):
        return redact(tree)  # type: ignore[return-value]
    if isinstance(tree, dict):
        return {redact_tree(key): redact_tree(value) for key, value in tree.items()}  # type: ignore[return-value]
    if isinstance(tree, (list, tuple)):
        return [redact_tree(item) for item in tree]  # type: ignore[return-value]
    return tree


@lru_cache(maxsize=2)
def _pattern(environment: tuple[tuple[str, str], ...]) -> re.Pattern[str] | None:
    """Of all secrets of an environment, the longest first; None where it has none."""
    values: set[str] = set()
    for name, value in environment:
        if not _SECRET_VARIABLE.search(name):
            if "://" in value and (password := password_of(value)):  # as of a proxy or a database
                values.add(password)
        elif not value.startswith("/"):  # a file that holds it
            values |= {value, value.partition(":")[2]}  # user:password
    secrets = {text for text in values if len(text) >= (MIN_PLAIN_SECRET if text.isalpha() else MIN_SECRET)}
    forms = sorted(secrets | {quote(text, safe="") for text in secrets}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, forms))) if forms else None


class _Record(logging.LogRecord):
    """A record without credentials, in its message and in its traceback, for every handler."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        if self.exc_info and self.exc_info[0] is not None:
            # Formatters take this text where there is one, and make none of their own.
            self.exc_text = redact("".join(traceback.format_exception(*self.exc_info)).rstrip())

    def getMessage(self) -> str:
        return redact(super().getMessage())


def redact_errors(function: Callable[Arguments, Found]) -> Callable[Arguments, Found]:
    """Redact credentials in everything that a function logs or raises, because Prefect stores error messages.

    What a Prefect task logs is labelled with it as its stage.
    """
    stage = function.__name__ if function.__module__.endswith("prefect_tasks") else None

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Found:
        redact_logs()
        try:
            with stage_label(stage):
                return function(*arguments, **options)
        except Exception as error:
            if redact(str(error)) != str(error):
                error.args = tuple(redact_tree(list(error.args)))
            if redact(str(error)) != str(error):  # some have words that are not their arguments
                raise RunError(redact(f"{type(error).__name__}: {error}")) from error
            raise

    # Prefect would look for the names in annotations where `call` is defined.
    call.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    return call


def redact_logs() -> None:
    """Redact credentials in everything that this process logs from now on."""
    logging.setLogRecordFactory(_Record)
