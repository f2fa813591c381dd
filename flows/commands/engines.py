"""How commands start a flow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from conf.site import Site


@contextmanager
def quiet_flow(site: Site) -> Iterator[None]:
    """Prefect's settings for a flow started here.

    Heartbeats tell a server which runs are dead. On the temporary one nobody listens, and the flow would wait a second
    for their thread at its end.
    """
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flows import preflight

    unheard = {} if preflight.prefect_server(site) else {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    with temporary_settings(unheard):
        yield
