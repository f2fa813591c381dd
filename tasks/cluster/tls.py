"""The certificates with which all Dask parts prove to each other that they belong together.

One directory, made by `infra/certificates`, holds the authority's certificate, one certificate for all parts, and its
key. Who has no certificate of that authority is refused by the scheduler and by every worker. A cluster of this host
alone needs none: it gets a certificate of its own, which this process keeps in memory, for loopback is open
to every user of the host, and Dask runs what it is sent.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paceline.conf.cluster import Cluster
from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError
from paceline.tasks.records.record import Choice, Record

if TYPE_CHECKING:
    from cryptography import x509
    from distributed import Security

SCHEME, OTHERS = "tls://", 0o077
OWN = "own"  # TLS with a certificate that is made for one cluster, and is gone with this process
WARN_DAYS = 30  # before certificates expire
LOOPBACK = ("localhost", "::1")
FILES = ("ca.pem", "cert.pem", "key.pem")

logger = logging.getLogger(__name__)


class Certificates(Record):
    """Paths of the three files, the same on every host."""

    authority: str
    certificate: str
    key: str

    def settings(self, *roles: str) -> dict[str, Any]:
        """Arguments of Dask's `Security` for these roles (`scheduler`, `worker`, `client`), as plain data."""
        files: dict[str, Any] = {"require_encryption": True, "tls_ca_file": self.authority}
        for role in roles:
            files |= {f"tls_{role}_cert": self.certificate, f"tls_{role}_key": self.key}
        return files

    def security(self) -> Security:
        """The same for all roles, as Dask wants it in this process."""
        from distributed import Security

        return Security(**self.settings("scheduler", "worker", "client"))


def choose_tls(settings: Cluster) -> Choice:
    """Whether the parts talk TLS, and why. Raises InputError: a scheduler elsewhere without, unless cluster.tls=off."""
    address = settings.address
    if address is None:
        if settings.tls != "auto":
            return Choice(value=settings.tls, reason="set by the user")
        if settings.is_this_host:
            reason = "other users of this host reach its loopback; the certificate is this run's alone"
            return Choice(value=OWN, reason=reason)
        return Choice(value="on", reason=f"kind {settings.kind} reaches beyond this host")
    if address.startswith(SCHEME):
        return Choice(value="on", reason="the address begins with tls://")
    if settings.tls == "off":
        return Choice(value="off", reason="set by the user")
    if is_loopback(address):
        return Choice(value="off", reason="the scheduler is on this host's loopback")
    raise InputError(
        f"cluster.address={address} is beyond this host and without TLS, so everybody can run code there; start "
        "scheduler and workers with the files of infra/certificates and join tls://, or accept it with cluster.tls=off"
    )


def proxy_days_left(site: Environment) -> tuple[Path, float] | None:
    """The certificate of a proxy of `infra/up --domain` on this host, and days until it expires; None without one."""
    from cryptography import x509

    for home in (site.tls_directory.parent, site.root / "services"):
        with suppress(OSError, ValueError):  # not there, of another user, or no certificate, which nginx names
            path = home / "proxy" / "cert.pem"
            return path, _days_until_first_end(x509.load_pem_x509_certificates(path.read_bytes()))
    return None


def proxy_renewal(certificate: Path) -> str:
    """How a certificate of the proxy is replaced."""
    return f"replace {certificate} and key.pem next to it, then call infra/up: the proxy reads them without a restart"


def days_left(found: Certificates) -> float:
    """Days until the certificate or the authority that issued it expires; below 0 when one has."""
    from cryptography import x509

    authority, certificate = (Path(path).read_bytes() for path in (found.authority, found.certificate))
    parsed_certificate = x509.load_pem_x509_certificate(certificate)
    authorities = x509.load_pem_x509_certificates(authority)
    issuers = [each for each in authorities if each.subject == parsed_certificate.issuer]
    return _days_until_first_end([parsed_certificate, *issuers])


def expiry_text(days: float) -> str:
    """What a certificate with some days left does: expires in 5 days, expired 3 days ago."""
    whole = round(abs(days))
    time = f"{whole} day{'s' if whole > 1 else ''}" if whole else "less than a day"
    return f"expires in {time}" if days >= 0 else f"expired {time} ago"


def _days_until_first_end(found: Sequence[x509.Certificate]) -> float:
    return (min(each.not_valid_after_utc for each in found) - datetime.now(UTC)) / timedelta(days=1)


def is_loopback(address: str) -> bool:
    """Whether an address such as tcp://127.0.0.1:8786 never leaves this host."""
    host = urlsplit(address if "://" in address else f"tcp://{address}").hostname or ""
    return host in LOOPBACK or host.startswith("127.")


def certificates(settings: Cluster, site: Environment) -> Certificates | None:
    """The certificates for a cluster, warning before they expire; None without TLS. Raises as `find_certificates`."""
    if (proxy := proxy_days_left(site)) is not None and proxy[1] < WARN_DAYS:
        _warn(proxy[0], expiry_text(proxy[1]), proxy_renewal(proxy[0]))
    if choose_tls(settings).value != "on":
        return None
    files = find_certificates(site)
    if (days := days_left(files)) < WARN_DAYS:
        _warn(site.tls_directory, expiry_text(days), f"renew it: infra/certificates --renew {site.tls_directory}")
    return files


@cache
def _warn(place: Path, expiry: str, renewal: str) -> None:  # each run asks several times
    logger.warning("the certificate in %s %s; %s", place, expiry, renewal)


def local_security(settings: Cluster, site: Environment) -> Security | None:
    """TLS settings of a cluster of this host, None for a cluster without TLS; raises as `find_certificates`."""
    if choose_tls(settings).value == OWN:
        from distributed import Security

        return Security.temporary()  # type: ignore[no-any-return]
    files = certificates(settings, site)
    return files.security() if files else None


_clusters: dict[str, Security] = {}


@contextmanager
def register_security(address: str, security: Security | None) -> Iterator[None]:
    """Have `security_of` know how a cluster of this process is joined, while the body lasts."""
    if security is not None:
        _clusters[address] = security
    try:
        yield
    finally:
        _clusters.pop(address, None)


def security_of(address: str, site: Environment) -> Security | None:
    """TLS settings of a scheduler of this process or of this site; None for tcp. Raises as `find_certificates`."""
    if not address.startswith(SCHEME):
        return None
    return _clusters.get(address) or find_certificates(site).security()


def certificate_paths(site: Environment) -> Certificates:
    """Where the certificates of this site lie, whether they are there or not."""
    authority, certificate, key = (str(site.tls_directory / name) for name in FILES)
    return Certificates(authority=authority, certificate=certificate, key=key)


def find_certificates(site: Environment) -> Certificates:
    """The site's certificates.

    Raises InputError: missing, not of one another, expired, or with a key that others can read.
    """
    place, files = site.tls_directory, certificate_paths(site)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(files.authority)
        context.load_cert_chain(files.certificate, files.key)
        mode = (place / "key.pem").stat().st_mode
    except OSError as error:  # ssl.SSLError is one
        missing = isinstance(error, FileNotFoundError)
        raise InputError(
            f"PACELINE_TLS={place} "
            + ("lacks" if missing else f"cannot be used ({error}); TLS between the Dask parts needs")
            + f" ca.pem, cert.pem and key.pem; make them with infra/certificates {place}, or set cluster.tls=off"
        ) from error
    if mode & OTHERS:
        fault = f"{files.key} can be read by others (mode {mode & 0o777:o})"
        raise InputError(f"{fault}; chmod 600 it", setting="PACELINE_TLS")
    if (days := days_left(files)) < 0:
        fault = f"PACELINE_TLS={place}: its certificate {expiry_text(days)}, and no part of Dask accepts it"
        raise InputError(fault, hint=f"infra/certificates --renew {place}", setting="PACELINE_TLS")
    return files
