"""Passes the result of a command's checks to the flow that it starts, so that nothing is checked twice."""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

from paceline.conf.environment import Environment

Check = TypeVar("Check", bound=Callable[..., Any])
Request = TypeVar("Request")
Result = TypeVar("Result")

_latest: ContextVar[tuple[object, object, object, Any] | None] = ContextVar("latest", default=None)
"""The latest check that passed: its name, its request, its environment and its result."""


def reusable(check: Check) -> Check:
    """Store the result of a check for the flow that starts next, see `result_of`."""

    @wraps(check)
    def call(request: object, environment: Environment, /, **options: Any) -> Any:
        result = check(request, environment, **options)
        _latest.set((check.__qualname__, request, environment, result))
        return result

    return cast(Check, call)


def result_of(check: Callable[[Request, Environment], Result], request: Request, environment: Environment) -> Result:
    """Take the result of the latest `reusable` check if it had these arguments, else check now, as in a deployment."""
    latest = _latest.get()
    if latest is not None and latest[:3] == (check.__qualname__, request, environment):
        result: Result = latest[3]
    else:
        result = check(request, environment)
    _latest.set(None)  # valid for one flow: the data or servers may change before the next one
    return result
