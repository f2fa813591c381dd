"""Reports the facts of a host before a cluster is started on it.

Use: `python -m paceline.tasks.cluster.host_report [TLS_DIRECTORY]`.

That this program answers at all shows that the host has the interpreter and the package where they are needed.
"""

import os
import sys
from pathlib import Path

from paceline.tasks.cluster.hardware import describe
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.record import Record


class HostFacts(Record):
    """One host, as seen from there."""

    hardware: Hardware
    code: str  # fingerprint of the code that its workers would run
    missing: tuple[str, ...]  # files of the certificates that cannot be read there


def facts(tls_directory: str | None) -> HostFacts:
    """Facts of the host this is called on."""
    files = [Path(tls_directory) / name for name in ("ca.pem", "cert.pem", "key.pem")] if tls_directory else []
    return HostFacts(
        hardware=describe(),
        code=code_fingerprint(),
        missing=tuple(str(path) for path in files if not os.access(path, os.R_OK)),
    )


if __name__ == "__main__":
    sys.stdout.write(facts(sys.argv[1] if len(sys.argv) > 1 else None).model_dump_json() + "\n")
