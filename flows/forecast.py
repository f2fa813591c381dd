"""The advice: profile one device and the link, predict N devices, rank what to do next, and record the prediction."""

from __future__ import annotations

import time
from typing import Any

from prefect import flow, get_run_logger
from pydantic import BaseModel, ConfigDict

from paceline.conf.config import Config
from paceline.conf.credentials import Text
from paceline.conf.environment import Environment, quieten
from paceline.conf.load import make_config
from paceline.flows.checks import preflight
from paceline.flows.checks.measured_plan import measured_plan
from paceline.flows.lifecycle.mlflow_run import new_run
from paceline.flows.lifecycle.outage import outlive_outages
from paceline.flows.lifecycle.prefect_artifacts import publish
from paceline.flows.lifecycle.report_artifacts import log_report
from paceline.flows.lifecycle.signals import stop_on_signal
from paceline.flows.run.forecast_check import execution_of, past_checks
from paceline.tasks.cluster.resources import demand_of
from paceline.tasks.cluster.start import open_cluster
from paceline.tasks.data.prefect_tasks import prepare
from paceline.tasks.errors import InputError
from paceline.tasks.fingerprint import workload_fingerprint
from paceline.tasks.host import has_compiler
from paceline.tasks.records import Arm, Measurement, MeasureResult, Plan
from paceline.tasks.redact import redact_errors
from paceline.tasks.report.forecast_report import advise_table, draw_advise, render_advise
from paceline.tasks.speedup.forecast.device_profile import (
    FASTER_INPUT,
    gains,
    link_samples,
    measure_interference,
    profile_of,
    rank_moves,
)
from paceline.tasks.speedup.forecast.links import LINKS, fit_link, given_link
from paceline.tasks.speedup.forecast.model import cheapest, limits, predict
from paceline.tasks.speedup.forecast.records import AdviseResult, DeviceProfile, Link, Prediction
from paceline.tasks.track import run as tracking
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.plan import arm_of, can_capture
from paceline.tasks.train.prefect_tasks import measure

TOKEN_BYTES = 4
MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
MIN_PARTS = 8
"""The smallest batch of the profile is at least so many times smaller than the recipe's."""
PROFILE_RANKS = 2
"""Devices that take part in profiling: enough to see what they cost each other, and what a message costs. One, where
the link is not this cluster's and so neither can be seen here."""


class AdviseRequest(BaseModel):
    """What is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    preset: Text
    """Name or path of the preset, for people."""
    config: Config
    """The run in question; its number of devices is not used."""
    devices: list[int]
    """Numbers of devices to predict."""
    link: str = "measured"
    """`measured` on this cluster, the name of a known kind of link, or `given`."""
    latency_seconds: float | None = None
    gigabytes_per_second: float | None = None
    """Both for link=given."""
    deadline_seconds: float | None = None
    """The whole training shall take no longer."""


def check_advise(request: AdviseRequest, site: Environment) -> tuple[Config, preflight.PreflightResult]:
    """Check everything before any work starts; the configuration of the profiling group.

    Raises:
        InputError: one line with the value, the rule and the fix.
    """
    if not request.devices or min(request.devices) < 2:  # noqa: PLR2004  one device is what all are compared with
        given = ",".join(map(str, request.devices))
        raise InputError(
            f"--devices must be numbers of 2 or more, got {given}",
            hint="for example --devices 2,4,8",
            setting="--devices",
        )
    if request.link not in ("measured", "given", *LINKS):
        raise InputError(f"--link {request.link} is not known; choose measured or one of {', '.join(LINKS)}")
    if request.link == "given":
        given_link(request.latency_seconds, request.gigabytes_per_second)
    batch = request.config.recipe.batch_size
    if batch < 2:  # noqa: PLR2004  how a step's time depends on its batch takes two
        raise InputError(f"recipe.batch_size={batch} leaves no smaller batch to profile beside it; use at least 2")
    if request.config.recipe.batch_scaling == "strong" and max(request.devices) > batch:
        raise InputError(
            f"--devices {max(request.devices)} exceeds recipe.batch_size={batch} under strong scaling; "
            f"a device needs a sample per step: use at most {batch} devices"
        )
    ranks = PROFILE_RANKS if request.link == "measured" else 1
    config = make_config(
        request.config,
        [f"execution.num_devices={ranks}", "execution.num_nodes=1", "speedup.baseline=none"],
    )
    try:
        return config, preflight.check(config, site)
    except InputError as error:
        if ranks == 1:
            raise
        raise InputError(
            f"{error}; two devices are needed to measure what they cost each other: or name a link, such as "
            "--link ethernet25, to profile one alone"
        ) from error


@flow(name="paceline-advise", flow_run_name="advise {request.config.name}", persist_result=False)
@stop_on_signal
@outlive_outages
@redact_errors
def run_advise(request: AdviseRequest) -> dict[str, Any]:
    """Predict what more devices would give, and rank what to do next.

    Args:
        request: What is asked.
    """
    quieten()
    started = time.monotonic()
    site = Environment()
    config, cleared = check_advise(request, site)
    with open_cluster(config.cluster, demand_of([config.execution], cleared.plan.accelerator), site) as address:
        cleared = preflight.confirm_on_cluster(config, cleared, address)
        prepared = prepare(config.data, str(site.root), address)
        workload = workload_fingerprint(config.workload, prepared.fingerprint, cleared.weights)
        with new_run(request.config, site, cleared.experiment_id, "advise", workload) as handle:
            tracking.log_dataset(handle, prepared, config.data.source)
            job = TrainJob(
                config=config,
                plan=cleared.plan,
                prepared=prepared,
                pretrained=cleared.pretrained,
                run_id=handle.run_id,
                tracking_uri=handle.tracking_uri,
                home=str(site.root),
            )
            plan = measured_plan(job, cleared.hardware, address)
            job = job.model_copy(update={"plan": plan})
            measured = measure(job.model_copy(update={"measurement": _profiling(config, plan, request)}), address)
            moved = measure(job.model_copy(update={"measurement": _moves(config, plan)}), address)
            link = _link(request, measured)
            profile = _profile(config, plan, prepared.num_train, measured)
            result = _advise(request, profile, link, moved)
            result = result.model_copy(
                update={
                    "run_id": handle.run_id,
                    "experiment": handle.experiment,
                    "workload": workload,
                    "seconds": time.monotonic() - started,
                }
            )
            _record(handle, result, plan)
    publish(advise_table(result), "advice", "What more devices would give")
    return summarise_advise(result, handle)


def _profiling(config: Config, plan: Plan, request: AdviseRequest) -> Measurement:
    """One device at several batch sizes; several that compute side by side, and that wait for each other as well."""
    batch = config.recipe.batch_size
    sizes = {batch, max(1, batch // 2), max(1, batch // max(*request.devices, MIN_PARTS))}
    single = _single(plan)
    points = {f"batch {size}": single.model_copy(update={"batch_size": size}) for size in sorted(sizes - {batch})}
    if plan.world_size == 1:
        half = points.pop(f"batch {max(1, batch // 2)}")
        return Measurement(
            arms={"baseline": single.model_copy(update={"batch_size": batch}), "candidate": half} | points
        )
    arms = {"baseline": single.model_copy(update={"batch_size": batch})} | points
    for size in sorted({min(sizes), batch}):
        several = single.model_copy(update={"num_devices": PROFILE_RANKS, "batch_size": size})
        for variant in ("no_sync", "token_sync", "full"):
            arms[f"{variant} {size}"] = several.model_copy(update={"variant": variant})
    return Measurement(
        arms=arms | {"candidate": arms.pop(f"full {batch}")}, all_reduce_bytes=(TOKEN_BYTES, *MESSAGE_BYTES)
    )


def _moves(config: Config, plan: Plan) -> Measurement:
    """The present execution on one device against each single change of it."""
    batch = config.recipe.batch_size
    present = _single(plan).model_copy(update={"batch_size": batch})
    changes: dict[str, dict[str, Any]] = {
        f"recipe.batch_size={2 * batch}": {"batch_size": 2 * batch},
        "execution.precision=bf16-mixed": {"precision": "bf16-mixed"},
        "execution.precision=32-true": {"precision": "32-true"},
        "execution.memory_format=channels_last": {"memory_format": "channels_last"},
        "execution.loading=resident": {"loading": "resident"},
        "execution.loading=streaming": {"loading": "streaming"},
        FASTER_INPUT: {"variant": "synthetic_input"},
    }
    if has_compiler() or plan.accelerator == "gpu":
        changes["execution.compile=step"] = {"compile": "step"}
    if can_capture(plan):
        changes["execution.compile=graph"] = {"compile": "graph"}
    arms = {name: present.model_copy(update=change) for name, change in changes.items()}
    different = {name: arm for name, arm in arms.items() if arm != present}
    first, *_ = different
    return Measurement(arms={"baseline": present, "candidate": different.pop(first)} | different)


def _single(plan: Plan) -> Arm:
    return arm_of(plan).model_copy(update={"num_devices": 1, "strategy": "ddp"})


def _profile(config: Config, plan: Plan, num_train: int, measured: MeasureResult) -> DeviceProfile:
    return DeviceProfile(
        points=profile_of(measured.probe),
        gradient_bytes=measured.gradient_bytes,
        batch_size=config.recipe.batch_size,
        num_train=num_train,
        num_epochs=config.recipe.num_epochs,
        company=measure_interference(measured.probe, measured.all_reduces) if plan.world_size > 1 else None,
        label=f"{plan.device_name}{_threads(plan)}, {_single(plan).label}",
        num_threads=plan.num_threads if plan.accelerator == "cpu" else None,
    )


def _threads(plan: Plan) -> str:
    if plan.accelerator == "gpu":
        return ""
    return f", {plan.num_threads} thread" + ("s" if plan.num_threads > 1 else "")


def _link(request: AdviseRequest, measured: MeasureResult) -> Link:
    if request.link == "measured":
        return fit_link(link_samples([one for one in measured.all_reduces if one.num_bytes > TOKEN_BYTES]))
    if request.link == "given":
        return given_link(request.latency_seconds, request.gigabytes_per_second)
    return LINKS[request.link]


def _advise(request: AdviseRequest, profile: DeviceProfile, link: Link, moved: MeasureResult) -> AdviseResult:
    price = request.config.speedup.price_per_device_hour
    predictions: list[Prediction] = []
    for scaling in ("strong", "weak"):
        for number in sorted(set(request.devices)):
            if scaling == "weak" or number <= profile.batch_size:
                predictions.append(predict(profile, link, number, scaling, price))
            else:
                get_run_logger().warning("No strong scaling to %d devices: fewer samples than devices", number)
    kind = request.config.recipe.batch_scaling
    probe = moved.probe
    compiled = any(arm.compile == "step" for arm in (probe.baseline, probe.candidate, *probe.others.values()))
    oom_stage = {} if compiled else {"execution.compile=step": "no C++ compiler was found"}
    return AdviseResult(
        run_id="",
        experiment="",
        preset=request.preset,
        workload="",
        profile=profile,
        link=link,
        predictions=tuple(predictions),
        limits=tuple(limits(profile, link, scaling) for scaling in ("strong", "weak")),
        bound=next(p for p in reversed(predictions) if p.scaling == kind).bound,
        advice=rank_moves(gains(probe), oom_stage),
        cheapest=None
        if request.deadline_seconds is None
        else cheapest(profile, link, kind, request.deadline_seconds, price),
        seconds=0.0,
    )


def _record(handle: tracking.RunHandle, result: AdviseResult, plan: Plan) -> None:
    checks = past_checks(handle)
    metrics: dict[str, float | None] = {}
    for prediction in result.predictions:
        prefix = f"prediction/{prediction.scaling}_{prediction.num_devices}_devices"
        metrics |= {
            f"{prefix}_ratio": prediction.ratio,
            f"{prefix}_low": prediction.low,
            f"{prefix}_high": prediction.high,
        }
    tracking.log_facts(handle, metrics, {"paceline.execution": execution_of(plan), "paceline.bound": result.bound})
    tracking.log_document(handle, "advice.json", result.model_dump(mode="json"))
    log_report(handle, render_advise(result, checks), draw_advise(result, checks))


def summarise_advise(result: AdviseResult, handle: tracking.RunHandle) -> dict[str, Any]:
    """The JSON of `paceline advise`; names and shape are the public contract."""
    return {
        "run_id": result.run_id,
        "experiment": result.experiment,
        "tracking_uri": handle.public_uri,
        "workload": result.workload,
        "predictions": [prediction.model_dump(mode="json") for prediction in result.predictions],
        "limits": [limit.model_dump(mode="json") for limit in result.limits],
        "bound": result.bound,
        "link": result.link.model_dump(mode="json"),
        "profile": result.profile.model_dump(mode="json"),
        "advice": [move.model_dump(mode="json") for move in result.advice],
        "cheapest": result.cheapest.model_dump(mode="json") if result.cheapest else None,
        "table": [list(row) for row in advise_table(result)],
        "seconds": result.seconds,
    }
