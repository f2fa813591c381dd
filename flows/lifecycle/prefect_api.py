"""Prefect's temporary API: an API on loopback while a command runs, if no server is given.

Prefect's own starts with the flow, imports its server here too (1.4 s), and outlives this process if it is killed.
This one is a fork of a process that has one thread, which shares its import of Prefect (decision 0041). A process with
more threads starts this module as a program: a fork has only one of them, and may wait for what the others hold.
"""

import atexit
import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from contextlib import suppress
from http import HTTPStatus
from typing import NoReturn

import psutil

from paceline.conf.environment import Environment
from paceline.flows.lifecycle.signals import defer_signals
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.host import die_with, has_one_thread
from paceline.tasks.http import ANSWER_SECONDS, ask, status
from paceline.tasks.track.connectivity import check_address

END_SECONDS = 5.0
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
AUTH_VARIABLE = "PREFECT_SERVER_API_AUTH_STRING"
AWAY_SECONDS = 1800.0  # longest wait of a flow for an API that does not answer
POLL_SECONDS = 2.0


class TemporaryApi:
    """A running or starting API; its socket takes connections from the start."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self._address = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
            # Other users of this host reach its loopback too, and could read this run's log or cancel it.
            self.auth = f"paceline:{secrets.token_urlsafe(32)}"
            import prefect.main  # noqa: F401  the flow uses it too, and a fork shares it

            start = _fork if has_one_thread() else _start_program
            self._process = start(listening, self.auth)
        self.is_used = False  # whether a flow uses its address

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
            with suppress(psutil.TimeoutExpired):  # its socket closes before it has ended
                reason = f"ended with status {self._process.wait(1)}"
            raise RunError(
                f"Prefect's temporary API {reason} ({error}); look at the lines above, or start a server "
                "(prefect server start) and set PREFECT_API_URL"
            ) from error

    def end(self) -> None:
        """End the API; at once if it never answered: until then it only prepares its database, in one transaction."""
        with suppress(psutil.NoSuchProcess):
            if self.is_used:
                self._process.terminate()
                with suppress(psutil.TimeoutExpired):
                    self._process.wait(END_SECONDS)
            self._process.kill()
            self._process.wait()


def _start_program(listening: socket.socket, auth: str) -> psutil.Process:
    return psutil.Popen(
        [sys.executable, "-P", "-m", __name__, str(listening.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=2,  # stdout is for the outcome
        env=os.environ | {AUTH_VARIABLE: auth},
        pass_fds=[listening.fileno()],
        start_new_session=True,  # a terminal's Ctrl-C must leave it to the flow, which reports its last state
    )


def _fork(listening: socket.socket, auth: str) -> psutil.Process:
    parent, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # their handlers are the command's
    try:
        pid = os.fork()
        if not pid:
            _become_api(listening, auth, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return psutil.Process(pid)


def _become_api(listening: socket.socket, auth: str, parent: int) -> NoReturn:
    """Serve the API in a fork, with what a program would have: the errors' output and the socket, no input, a session.

    Its process never returns to the code of the command.
    """
    try:
        die_with(parent)
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            if descriptor > 2 and descriptor != listening.fileno():  # noqa: PLR2004
                with suppress(OSError):  # that of the list itself
                    os.close(descriptor)
        os.environ[AUTH_VARIABLE] = auth
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()  # Prefect has read them before the fork
        serve(listening)
    except BaseException:  # noqa: BLE001  as a program does
        traceback.print_exc()
    finally:
        os._exit(1)


_running: list[TemporaryApi] = []
_given_up: set[str] = set()  # addresses of APIs that were away for longer than a flow waits


def start_api() -> TemporaryApi:
    """Start the API of this process, or return the running one; it ends with the process."""
    if not _running:
        with defer_signals():  # a signal in between would leave it without an owner
            _running.append(TemporaryApi())
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
        return None
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if not settings.server.ephemeral.enabled:
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


def serve(listening: socket.socket) -> None:
    """Serve the API on a socket until a signal ends this process."""
    gc.disable()  # a quarter of the time of all these imports
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(ephemeral=True, final=True)
    gc.freeze()
    gc.enable()
    uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on")).run([listening])


def main(descriptor: int, parent: int) -> None:
    """Serve the API on a listening socket, until the process `parent` ends."""
    die_with(parent)
    serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
