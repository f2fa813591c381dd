"""Files by which systemd, or an engine of containers, starts the services of a site in place of infra/up.

Each service is started by `infra.services run NAME` and asked for its health by `infra.services check NAME`.
"""

import os
import pwd
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from infra.services.site import Service, Site
from paceline.tasks.cluster.hardware import describe
from paceline.tasks.errors import InputError
from paceline.tasks.files import write_durably

REPOSITORY = Path(__file__).parents[2]
UNIT = Path(__file__).with_name("unit.service").read_text(encoding="utf-8")
IN_IMAGE = "/opt/paceline"
LEASES = Path("/run/lock")
HOMES = tuple(map(Path, ("/home", "/root", "/run/user")))
START_SECONDS = 300
MADE = "Made by infra/up"
PREFIX = "paceline"  # of the names of units
LOWEST_FREE_PORT = 1024  # a port below needs a capability


def write_units(site: Site, user: str, directory: Path) -> list[str]:
    """Write a unit for each service, and a target for all; their names."""
    texts = {f"{PREFIX}-{service.name}.service": _unit(site, service, user) for service in site.services}
    wants = f"Wants={' '.join(texts)}"
    texts[f"{PREFIX}.target"] = (
        f"# {MADE} --units.\n[Unit]\nDescription=Paceline\n{wants}\n\n[Install]\nWantedBy=multi-user.target\n"
    )
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_durably(directory / name, text.encode())
        (directory / name).chmod(0o644)
    return list(texts)


def command(site: Site, verb: str, service: Service, *options: str, python: str = sys.executable) -> list[str]:
    """The command by which a supervisor starts a service (`run`) or asks for its health (`check`)."""
    return [python, "-P", "-m", "infra.services", verb, "--home", str(site.home.root), *options, service.name]


def user_of_services() -> pwd.struct_passwd:
    """The user who runs the services. Raises InputError: that would be root."""
    if os.geteuid() == 0:
        hint = "call this as their user: sudo -u paceline --preserve-env=PACELINE_HOME infra/up ..."
        raise InputError("the services do not run as root, and their home is their user's", hint=hint)
    return pwd.getpwuid(os.geteuid())


def _unit(site: Site, service: Service, user: str) -> str:
    home = site.home.root
    writes = [home / name for name in service.writes] + ([site.paceline_home, LEASES] if service.devices else [])
    lines = [f"ReadWritePaths={_words(writes)}"]
    required = {name for each in site.services for name in each.requires}
    if service.name in required and not service.once:  # those that require it start once it is well
        check = command(site, "check", service, "--wait", str(START_SECONDS))
        lines.append(f"ExecStartPost={_words(check).replace('$', '$$')}")
    if service.reload_signal is not None:
        lines.append(f"ExecReload=/bin/kill -s {service.reload_signal} $MAINPID")
    if service.devices:  # leases of devices are shared by all users of the host
        lines.append(f"ExecStartPre=+/usr/bin/install --directory --mode 1777 {LEASES / 'paceline'}")
    if "." not in service.writes:
        hidden = {name for each in site.services for name in (*each.reads, *each.writes)} | {"environment", "backups"}
        hidden -= {".", *service.reads, *service.writes}
        lines += [f"InaccessiblePaths=-{_words([home / name])}" for name in sorted(hidden)]
        lines.append(f"TemporaryFileSystem={_words([site.home.secrets])}:ro")
        lines += [f"BindReadOnlyPaths={_words([site.home.secrets / name])}" for name in service.secrets]
    if is_low := _has_low_port(site, service):
        lines.append("AmbientCapabilities=CAP_NET_BIND_SERVICE")
    python_path = os.environ.get("PYTHONPATH", REPOSITORY)
    environment = (f"PACELINE_HOME={site.paceline_home}", f"PYTHONPATH={python_path}")
    places = (home, site.paceline_home, REPOSITORY, Path(sys.executable))
    values = {
        "about": service.about,
        "after": " ".join(f"{PREFIX}-{name}.service" for name in service.requires),
        "type": "oneshot\nRemainAfterExit=yes" if service.once else "exec",
        "user": user,
        "environment": "\n".join(f"Environment={_words([variable])}" for variable in environment),
        "start": _words(command(site, "run", service)).replace("$", "$$"),
        "signal": service.stop_signal,
        "capabilities": "CAP_NET_BIND_SERVICE" if is_low else "",
        "protect": "read-only" if any(path.is_relative_to(place) for path in places for place in HOMES) else "yes",
        "more": "\n".join(lines),
    }
    return re.sub(r"\{(\w+)\}", lambda found: values[found[1]], UNIT)


def _has_low_port(site: Site, service: Service) -> bool:
    return any(site.settings.ports[name] < LOWEST_FREE_PORT for name in service.ports)


def _words(words: list[Any]) -> str:
    """Words as systemd reads them."""
    texts = (re.sub(r'(["\\])', r"\\\1", str(word)).replace("%", "%%") for word in words)
    return " ".join(text if re.fullmatch(r"[\w@+=:,./-]+", text) else f'"{text}"' for text in texts)


def write_compose(site: Site, user: pwd.struct_passwd, path: Path) -> None:
    """Write a file of compose."""
    services = {service.name: dict(_container(site, service, user)) for service in site.services}
    text = yaml.safe_dump({"services": services}, sort_keys=False, width=10**6).replace("$", "$$")
    write_durably(path, f"# {MADE} --compose from infra/services/services.yaml.\n{text}".encode())


def _container(site: Site, service: Service, user: pwd.struct_passwd) -> Iterator[tuple[str, Any]]:
    home, required = site.home.root, [site[name] for name in service.requires]
    yield "image", f"paceline:{metadata.version('paceline')}"
    account = {"USER_ID": user.pw_uid, "GROUP_ID": user.pw_gid}
    yield "build", {"context": str(REPOSITORY), "dockerfile": "infra/Dockerfile", "args": account}
    yield "command", command(site, "run", service, python="python")
    is_low = _has_low_port(site, service)
    yield "user", "0:0" if is_low else f"{user.pw_uid}:{user.pw_gid}"
    yield "network_mode", "host"  # ranks of several hosts talk to each other directly; nothing listens beyond --host
    yield "restart", "on-failure" if service.once else "unless-stopped"
    yield "security_opt", ["no-new-privileges:true"]
    yield "cap_drop", ["ALL"]
    if is_low:
        yield "cap_add", ["NET_BIND_SERVICE", "SETUID", "SETGID", "DAC_OVERRIDE"]
    yield "environment", {"PACELINE_HOME": str(site.paceline_home), "PYTHONPATH": IN_IMAGE}
    mounts = {home / name: "rw" for name in service.writes}
    mounts |= {home / name: "ro" for name in ("settings.json", *service.reads) if "." not in service.writes}
    mounts |= {site.home.secrets / name: "ro" for name in service.secrets if "." not in service.writes}
    if service.devices:
        mounts |= {site.paceline_home: "rw", LEASES: "rw"}
        if home.is_relative_to(site.paceline_home):
            yield "tmpfs", [str(home)]  # covers what is mounted with PACELINE_HOME
        yield "shm_size", "8gb"  # NCCL between the ranks of this host
        yield "ulimits", {"memlock": -1}
    if service.devices and describe().gpus:
        gpus = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        yield "deploy", {"resources": {"reservations": {"devices": [gpus]}}}
    yield "volumes", [f"{path}:{path}:{mode}" for path, mode in sorted(mounts.items())]
    if required:
        conditions = {True: "service_completed_successfully", False: "service_healthy"}
        yield "depends_on", {each.name: {"condition": conditions[each.once]} for each in required}
    if service.health is not None or service.name == "postgres":
        test = ["CMD", *command(site, "check", service, python="python")]
        yield "healthcheck", {"test": test, "interval": "30s", "timeout": "30s", "retries": 20}
    yield "stop_signal", service.stop_signal
    yield "stop_grace_period", f"{service.stop_seconds:g}s"
