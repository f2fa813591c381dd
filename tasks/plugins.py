"""Code of the user's, from an installed package: loaded where it is needed, and named where it fails."""

import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.conf import plugins
from paceline.conf.plugins import Kind, Plugin, PluginError
from paceline.tasks.errors import InputError, PacelineError, one_line


@contextmanager
def require_plugin() -> Iterator[None]:
    """Raise an InputError, with the host, if a package that the body needs is not installed or cannot be imported."""
    try:
        yield
    except PluginError as error:
        raise InputError(f"on host {socket.gethostname()}: {error}") from error


def load_plugin(kind: Kind, name: str) -> tuple[Plugin, Any]:
    """Load a plugin of the user by name; the plugin and its object. Errors as in `require_plugin`."""
    with require_plugin():
        return plugins.load(kind, name)


@contextmanager
def attribute_errors_to(
    plugin: Plugin, doing: str, kind: type[PacelineError], outside: type[PacelineError]
) -> Iterator[None]:
    """Name the package, and the line in it, in whatever its code raises in the body."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        raised = outside if isinstance(error, OSError) else kind
        frames = traceback.extract_tb(error.__traceback__)  # as far as that is Python
        place = f" in {frames[-1].filename}, line {frames[-1].lineno}" if len(frames) > 1 else ""
        raise raised(f"{plugin}: {doing} raised {type(error).__name__} ({one_line(error)}){place}") from error
