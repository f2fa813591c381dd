"""Errors by their class and their setting, so that a changed message changes no test of a rule."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.conf.hints import HintedError
from paceline.conf.load import ConfigError
from paceline.tasks.errors import InputError


@contextmanager
def refused(
    setting: str | None,
    *data: object,
    kind: type[HintedError] | tuple[type[HintedError], ...] = (ConfigError, InputError),
) -> Iterator[pytest.ExceptionInfo[HintedError]]:
    """Expect that the body raises an error about a setting.

    Args:
        setting: the dotted name, option, variable or argument that the error has to carry.
        data: what the message has to contain, where several rules are about one setting: values, other settings, files
            and `key=value`. Never prose, so a text without blanks.
        kind: of the error.
    """
    with pytest.raises(kind) as caught:
        yield caught
    check_refusal(caught.value, setting, *data)


def check_refusal(error: HintedError, setting: str | None, *data: object) -> None:
    """Check the setting and the data of an error, and that its message is one line."""
    assert (error.setting, str(error).count("\n")) == (setting, 0), str(error)
    check_data(str(error), *data)


def check_data(message: str, *data: object) -> None:
    """Check that a message contains values, settings or `key=value`, each not as a part of a longer word."""
    for word in map(str, data):
        assert " " not in word, f"{word} is prose"
        assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", message), f"{word} is not in: {message}"
