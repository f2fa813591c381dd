"""Lets running parts of Dask use renewed certificates: a preload of all of them, by conf/dask/dask.yaml."""

import ssl
from pathlib import Path
from typing import Any

CHECK_SECONDS = 10.0
ROLES = {"Scheduler": "scheduler", "Client": "client"}  # other parts are of workers


def dask_setup(part: Any) -> None:
    """Use the certificates of a part's files again whenever they change, for all connections from then on.

    Each part reads its files once, at its start. Connections that are open stay open.

    Args:
        part: Scheduler, Nanny, Worker or Client, in the thread of its event loop.
    """
    from tornado.ioloop import PeriodicCallback

    role = ROLES.get(type(part).__name__, "worker")
    names = part.security.get_tls_config_for_role(role)
    files = [names["ca_file"], names["cert"], names["key"]]
    if not all(files) or any("\n" in file for file in files):
        return  # without TLS, or with a certificate in memory

    loaded: list[int] = []

    def times() -> list[int]:
        return [Path(file).stat().st_mtime_ns for file in files]

    def renew() -> None:
        nonlocal loaded
        try:
            if (now := times()) == loaded:
                return
            connecting = part.security.get_connection_args(role)["ssl_context"]
            listening = part.security.get_listen_args(role)["ssl_context"]
        except (OSError, ssl.SSLError):
            return  # they are being replaced: the next check finds them complete
        part.connection_args["ssl_context"] = connecting
        for listener in getattr(part, "listeners", ()):
            listener.tcp_server.ssl_options = listening
        loaded = now

    callbacks = part._periodic_callbacks if role == "client" else part.periodic_callbacks  # it stops them at its end
    callbacks["certificates"] = PeriodicCallback(renew, CHECK_SECONDS * 1000)
    callbacks["certificates"].start()
