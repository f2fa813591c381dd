"""How commands start a flow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.conf.environment import Environment


def collect_again() -> None:
    """Have garbage looked for from now on, but not among what is imported; until then a command starts faster."""
    gc.freeze()
    gc.enable()


@contextmanager
def quiet_flow(site: Environment) -> Iterator[None]:
    """Prefect's settings for a flow started here: those of the temporary API, where there is no server.

    Heartbeats tell a server which runs are dead. On the temporary one nobody listens, and the flow would wait a second
    for their thread at its end.
    """
    from paceline.flows.lifecycle import prefect_api

    api = prefect_api.prepare_api(site)
    from prefect import settings

    collect_again()
    if api is None:
        yield
        return
    url = api.url(settings.get_current_settings().server.ephemeral.startup_timeout_seconds)
    with settings.temporary_settings(
        {
            settings.PREFECT_API_URL: url,
            settings.PREFECT_API_AUTH_STRING: api.auth,
            settings.PREFECT_UI_URL: "",  # it has none
            settings.PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
        }
    ):
        yield
