"""Prefect's temporary API: an API on loopback while a command runs, if no server is given.

Prefect's own starts with the flow, imports its server here too (1.4 s), and outlives this process if it is killed. As a
program, this module is that API.
"""

import atexit
import fcntl
import gc
import importlib
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from contextlib import suppress
from http import HTTPStatus

from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.host import die_with
from paceline.tasks.http import ANSWER_SECONDS, ask, status
from paceline.tasks.track.connectivity import check_address

END_SECONDS = 5.0
SERVE = b"serve"
"""What makes an imported API serve."""
AWAY_SECONDS = 1800.0  # longest wait of a flow for an API that does not answer
POLL_SECONDS = 2.0


class TemporaryApi:
    """An API that runs or starts; its socket takes connections at once. It is only imported until `serve` is called."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self._address = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
            descriptor = fcntl.fcntl(listening, fcntl.F_DUPFD_CLOEXEC, 3)  # not 0 or 1, which may be closed here
            # Other users of this host reach its loopback too, and could read this run's log or cancel it.
            self.auth = f"paceline:{secrets.token_urlsafe(32)}"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(descriptor), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=2,  # stdout is for the outcome
                env=os.environ | {"PREFECT_SERVER_API_AUTH_STRING": self.auth},
                pass_fds=[descriptor],
                start_new_session=True,  # a terminal's Ctrl-C must leave it to the flow, which reports its last state
            )
            os.close(descriptor)
        self.is_used = False  # whether a flow uses its address

    def serve(self) -> None:
        """Let it prepare its database and answer; again, this has no effect."""
        stdin = self._process.stdin
        assert stdin is not None
        if not stdin.closed:
            with suppress(BrokenPipeError), stdin:  # it has ended, which `wait` reports
                stdin.write(SERVE)

    def url(self, seconds: float) -> str:
        """Wait until the API answers, and return its address; raise RunError if it does not."""
        self.wait(seconds)
        self.is_used = True
        return self._address

    def wait(self, seconds: float) -> None:
        """Wait until the API answers; raise RunError if it does not."""
        try:
            urllib.request.urlopen(f"{self._address}/health", timeout=seconds).close()
        except OSError as error:
            reason = f"does not answer within {seconds:g} s"
            with suppress(subprocess.TimeoutExpired):  # its socket closes before it has ended
                reason = f"ended with status {self._process.wait(1)}"
            raise RunError(
                f"Prefect's temporary API {reason} ({error}); look at the lines above, or start a server "
                "(prefect server start) and set PREFECT_API_URL"
            ) from error

    def end(self) -> None:
        """End the API; at once if it never answered: until then it only prepares its database, in one transaction."""
        if self.is_used:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.communicate()


_running: list[TemporaryApi] = []
_given_up: set[str] = set()  # addresses of APIs that were away for longer than a flow waits


def import_api(environment: Environment) -> None:
    """Start to import the API of this process, unless a server is named; `prepare_api` lets it serve.

    Where Prefect is imported already, a profile of it may name a server, and `prepare_api` starts the API as soon.
    """
    if not environment.prefect_api_url and not _running and "prefect" not in sys.modules:
        _running.append(TemporaryApi())


def start_api() -> TemporaryApi:
    """Start the API of this process, or return the running one; it ends with the process."""
    if not _running:
        _running.append(TemporaryApi())
    _running[0].serve()
    return _running[0]


def stop_unused_api() -> None:
    """End the API if no flow uses it."""
    if _running and not _running[0].is_used:
        _end()


def _end() -> None:
    while _running:
        _running.pop().end()


atexit.register(_end)  # registered before Prefect is imported, so it runs after Prefect's own exit


def prepare_api(environment: Environment) -> TemporaryApi | None:
    """Start Prefect's temporary API; None if there is a server, or Prefect's settings disable the API."""
    if prefect_server(environment):
        stop_unused_api()  # a profile of Prefect's names it
        return None
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if not settings.server.ephemeral.enabled:
        stop_unused_api()
        return None
    try:
        settings.home.mkdir(parents=True, exist_ok=True)  # Prefect makes it only where its parent is there
    except OSError as error:
        fault = f"PREFECT_HOME={settings.home} cannot be made ({error})"
        raise InputError(f"{fault}; set it to a directory of yours") from error
    return start_api()


def check_prefect(environment: Environment) -> None:
    """Raise InputError if a Prefect server is named and does not answer, or refuses this user."""
    url = prefect_server(environment)
    if not url:
        return
    check_address("PREFECT_API_URL", url, "set PREFECT_API_AUTH_STRING instead")
    try:
        healthy = ask(f"{url.rstrip('/')}/health").strip() == b"true"
    except (OSError, ValueError) as error:
        fault = f"PREFECT_API_URL={url} does not answer within {ANSWER_SECONDS:g} s ({error})"
        raise InputError(f"{fault}; start the server (prefect server start) or unset the variable") from error
    if not healthy:
        fault = f"PREFECT_API_URL={url} answers, but is not a Prefect API"
        raise InputError(f"{fault}; it ends in /api, as in http://host:4200/api")
    user = environment.prefect_user
    if user is None and environment.prefect_api_url is None:  # Prefect's profile names the server and the user
        from prefect.settings import get_current_settings

        user = get_current_settings().api.auth_string
    with suppress(OSError):  # it was healthy a moment ago, and Prefect retries
        answer = status(f"{url.rstrip('/')}/admin/version", user.get_secret_value() if user is not None else None)
        if answer == HTTPStatus.UNAUTHORIZED:  # it reports its health to every user
            raise InputError(f"PREFECT_API_URL={url} refuses this user; set PREFECT_API_AUTH_STRING to NAME:PASSWORD")


def wait_for_api() -> None:
    """Wait until Prefect's API answers, for half an hour at most; never for the temporary one."""
    from prefect import get_run_logger
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url
    if url is None or _running or url in _given_up or _answers(url):
        return
    log = get_run_logger()
    log.warning("Prefect's API %s does not answer; waiting for it for up to %g min", url, AWAY_SECONDS / 60)
    deadline = time.monotonic() + AWAY_SECONDS
    while time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if _answers(url):
            log.info("Prefect's API answers again")
            return
    _given_up.add(url)
    log.error("Prefect's API %s is away: Prefect does not learn how this run ends; see its run in MLflow", url)


def _answers(url: str) -> bool:
    """Return whether the API answers and has its database, which `/health` does not look at."""
    with suppress(OSError, ValueError):
        return status(f"{url.rstrip('/')}/ready") < HTTPStatus.INTERNAL_SERVER_ERROR
    return False


def prefect_server(environment: Environment) -> str | None:
    """Address of the Prefect server, from the environment or Prefect's own profile; None for the temporary one."""
    if environment.prefect_api_url is not None:
        return environment.prefect_api_url or None
    from prefect.settings import get_current_settings

    return get_current_settings().api.url


def main(descriptor: int, parent: int) -> None:
    """Import the API, and serve it on a listening socket when stdin says so, until the process `parent` ends."""
    die_with(parent)
    gc.disable()  # a quarter of the time of all these imports
    with suppress(Exception), warnings.catch_warnings(action="ignore"):  # the import below fails again, if it serves
        importlib.import_module("prefect.server.api.server")
    if sys.stdin.buffer.read(len(SERVE)) != SERVE:
        return
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(ephemeral=True, final=True)
    gc.freeze()
    gc.enable()
    uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on")).run([socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
