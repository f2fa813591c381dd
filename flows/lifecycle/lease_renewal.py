"""Renewal of a flow run's concurrency lease that outlives an outage of Prefect's API.

Prefect 3.8.8 renews the lease of a deployment's run every 225 s for 300 s more, and cancels the flow when that fails
three times (`raise_on_lease_renewal_failure` in `prefect/flow_engine.py`; no setting changes it). A training without a
lease does no harm: `tasks/train/launch/device_lock.py` prevents two trainings on one device.
"""

from __future__ import annotations

import threading
from http import HTTPStatus
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.concurrency import _leases
from prefect.exceptions import PrefectHTTPStatusError
from prefect.logging import get_run_logger

LEASE_SECONDS = 1800.0
"""Duration of a renewed lease: a shorter outage loses no slot."""
RETRY_SECONDS = 10.0


def tolerate_outages() -> None:
    """Replace the renewal of leases in Prefect's client, in this process."""
    _leases._lease_renewal_loop = _renew_while_running


def _renew_while_running(lease_id: UUID, lease_duration: float, stop_event: threading.Event) -> None:
    """Replace `prefect.concurrency._leases._lease_renewal_loop`, in the thread that Prefect starts for it."""
    is_away = False
    while not stop_event.is_set():
        try:
            with get_client(sync_client=True) as client:
                client.renew_concurrency_lease(lease_id=lease_id, lease_duration=LEASE_SECONDS)
        except Exception as error:  # noqa: BLE001  no error of the renewal may end a training
            if isinstance(error, PrefectHTTPStatusError) and error.response.status_code == HTTPStatus.GONE:
                get_run_logger().warning(
                    "Prefect does not know this run's concurrency lease any more, as after a restart of its server; "
                    "the run continues without"
                )
                return
            if not is_away:
                get_run_logger().warning(
                    "Prefect's API did not renew this run's concurrency lease (%s); the run continues, and tries again",
                    error,
                )
            is_away = True
            stop_event.wait(RETRY_SECONDS)
        else:
            is_away = False
            stop_event.wait(lease_duration * _leases._RENEWAL_FRACTION)
