"""Lets running parts of Dask use renewed certificates: a preload of all of them, by conf/dask/dask.yaml."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

CHECK_SECONDS = 10.0
ROLES = {"Scheduler": "scheduler", "Client": "client"}  # other parts are of workers


def dask_setup(part: Any) -> None:
    """Use the certificates of a part's files again whenever they change, for all connections from then on.

    A check comes every `CHECK_SECONDS`. Files that cannot be read or do not fit together are tried again then, without
    a message. Dask itself reads the files once, at a part's start. Connections that are open stay open.

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

    def read_again() -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
        """Contexts for connecting and listening, where the files have changed; in a thread, as a mount may hang."""
        nonlocal loaded
        try:
            if (now := [Path(file).stat().st_mtime_ns for file in files]) == loaded:
                return None
            contexts = part.security.get_connection_args(role), part.security.get_listen_args(role)
        except (OSError, ssl.SSLError):
            return None  # they are being replaced: the next check finds them complete
        loaded = now
        return contexts[0]["ssl_context"], contexts[1]["ssl_context"]

    async def renew() -> None:
        if (contexts := await asyncio.to_thread(read_again)) is not None:
            part.connection_args["ssl_context"] = contexts[0]
            for listener in getattr(part, "listeners", ()):
                listener.tcp_server.ssl_options = contexts[1]

    callbacks = part._periodic_callbacks if role == "client" else part.periodic_callbacks  # it stops them at its end
    callbacks["certificates"] = PeriodicCallback(renew, CHECK_SECONDS * 1000)
    callbacks["certificates"].start()
