"""The pipeline: prepare, train, evaluate, account; every stage a Prefect task, the whole one MLflow run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from conf.schema import Config
from conf.site import Site, quieten
from flows import preflight
from flows.record import Outcome, record, summarise
from tasks.cluster.open import open_cluster
from tasks.data.steps import prepare
from tasks.errors import InputError
from tasks.evaluate.steps import evaluate
from tasks.fingerprint import workload_fingerprint
from tasks.records import PreparedSet
from tasks.speedup.steps import account
from tasks.speedup.summary import summary_table
from tasks.track import run as tracking
from tasks.track.run import RunHandle
from tasks.train.coordinate import TrainJob
from tasks.train.owner import own
from tasks.train.steps import train


@flow(name="paceline-run", flow_run_name="{config.name}", persist_result=False)
def run_pipeline(config: Config, resume: str | None = None) -> dict[str, Any]:
    """Prepare data, train, evaluate, and account for the speed of it.

    Args:
        config: Everything the run can be told; see the help of each field.
        resume: Id of an unfinished MLflow run to go on with, from its newest checkpoint.
    """
    quieten()
    started = time.monotonic()
    site = Site()
    cleared = preflight.check(config, site)
    with open_cluster(config.cluster, config.execution.world_size) as address:
        prepared = prepare(config.data, str(site.root), address)
        workload = workload_fingerprint(config.workload, prepared.fingerprint)
        with _tracked(config, site, cleared, prepared, workload, resume) as handle:
            job = TrainJob(
                config=config,
                plan=cleared.plan,
                prepared=prepared,
                run_id=handle.run_id,
                tracking_uri=handle.tracking_uri,
                home=str(site.root),
                resume=resume is not None,
            )
            trained = train(job, address)
            evaluated = evaluate(trained, prepared)
            speedup = account(trained, cleared.hardware.num_cores)
            outcome = Outcome(
                config=config,
                plan=cleared.plan,
                prepared=prepared,
                trained=trained,
                evaluated=evaluated,
                speedup=speedup,
                workload=workload,
            )
            summary = summarise(outcome, handle, time.monotonic() - started)
            record(outcome, handle, summary)
    _publish(summary)
    return summary


@contextmanager
def _tracked(
    config: Config,
    site: Site,
    cleared: preflight.Cleared,
    prepared: PreparedSet,
    workload: str,
    resume: str | None,
) -> Iterator[RunHandle]:
    """The MLflow run of the pipeline, which ends with its true status whatever happens."""
    tags = {
        "paceline.workload": workload,
        "paceline.role": "run",
        "prefect.flow_run_id": str(flow_run.get_id() or ""),
    }
    if resume is None:
        handle = tracking.begin(site.tracking_uri, cleared.experiment_id, config, tags)
    else:
        handle, _ = tracking.reopen(site.tracking_uri, resume)
        _check_same_workload(handle, workload)
    get_run_logger().info("MLflow run %s in %s", handle.run_id, handle.experiment)
    with own(site.root / "runs" / handle.run_id):  # refuses before anything of the run is changed
        try:
            if resume is None:
                tracking.log_config(handle, config)
            else:
                tracking.revive(handle, tags)
            tracking.log_dataset(handle, prepared, config.data.source)
            yield handle
        except Exception as error:
            _finish(handle, "FAILED", str(error))
            raise
        except BaseException:  # Ctrl-C, SIGTERM, a cancelled flow
            _finish(handle, "KILLED", f"interrupted; go on with: paceline run --resume {handle.run_id}")
            raise
        tracking.finish(handle, "FINISHED")


def _finish(handle: RunHandle, status: tracking.Status, error: str) -> None:
    """End the run without hiding the error that ended it."""
    try:
        tracking.finish(handle, status, error)
    except Exception:  # noqa: BLE001  the store may be what failed; the first error is the one to tell
        get_run_logger().exception("MLflow run %s could not be set %s", handle.run_id, status)


def _check_same_workload(handle: RunHandle, workload: str) -> None:
    before = tracking.tag(handle, "paceline.workload")
    if before != workload:
        raise InputError(
            f"--resume {handle.run_id}: its workload was {before} and is now {workload}; "
            "the data have changed since: start a new run"
        )


def _publish(summary: dict[str, Any]) -> None:
    rows = "\n".join(f"| {name} | {value} |" for name, value in summary_table(summary))
    create_markdown_artifact(
        key="summary", markdown=f"| | |\n|---|---|\n{rows}\n", description="What the run achieved and how fast"
    )
