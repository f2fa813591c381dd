"""The forecast: profiles devices and the link, predicts N devices, ranks changes, and records the result."""

import time
from typing import Any

from prefect import flow, get_run_logger
from pydantic import BaseModel, ConfigDict

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.lightning import LENGTH_HINT, ends_by_time
from paceline.conf.section import Text
from paceline.flows.checks import preflight
from paceline.flows.checks.lightning import configure, read_again
from paceline.flows.checks.measured_plan import measure_plan, train_job
from paceline.flows.checks.origin import is_from_api
from paceline.flows.lifecycle.mlflow_run import new_run
from paceline.flows.lifecycle.mlflow_views import log_report
from paceline.flows.lifecycle.outage import guard_flow, publish, with_retries
from paceline.flows.run.history import execution_of, past_checks, scaling_of
from paceline.flows.run.lightning import prepare_own
from paceline.tasks.cluster.client import demand_of
from paceline.tasks.cluster.kinds import open_cluster
from paceline.tasks.data.prefect_tasks import prepare
from paceline.tasks.errors import InputError
from paceline.tasks.fingerprint import lightning_fingerprint, workload_fingerprint
from paceline.tasks.host import has_compiler
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.execution import FASTER_INPUT, Arm, Plan
from paceline.tasks.records.measurement import Measurement, MeasureResult, TrainingLength
from paceline.tasks.report.forecast_report import advise_table, draw_advise, render_advise
from paceline.tasks.speedup.forecast import device_profile
from paceline.tasks.speedup.forecast.links import LINKS, fit_link, given_link
from paceline.tasks.speedup.forecast.model import Forecast
from paceline.tasks.speedup.forecast.records import AdviseResult, DeviceProfile, Link, Prediction
from paceline.tasks.track import run as tracking
from paceline.tasks.train.plan import arm_of, can_capture
from paceline.tasks.train.prefect_tasks import measure, with_partitions

TOKEN_BYTES = 4
MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
MIN_PARTS = 8  # the recipe's batch is at least this many times the smallest batch of the profile
PROFILE_RANKS = 2  # devices of the profile, to measure their interference and the cost of messages


class AdviseRequest(BaseModel):
    """Parameters of a forecast."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    preset: Text
    """Name or path of the preset, for people."""
    config: Config
    """The run to forecast; its number of devices is ignored."""
    devices: list[int]
    """Numbers of devices to predict."""
    link: str = "measured"
    """`measured` on this cluster, the name of a known kind of link, or `given`."""
    latency_seconds: float | None = None
    gigabytes_per_second: float | None = None
    """Both are for link=given."""
    deadline_seconds: float | None = None
    """Longest acceptable training."""


@preflight.reusable
def check_advise(request: AdviseRequest, environment: Environment) -> tuple[Config, preflight.PreflightResult]:
    """Check everything before any work starts; the configuration of the profiling group."""
    if not request.devices or min(request.devices) < 2:  # noqa: PLR2004  one device is what all are compared with
        given = ",".join(map(str, request.devices))
        raise InputError(f"--devices must be numbers of 2 or more, got {given}; for example --devices 2,4,8")
    if request.link not in ("measured", "given", *LINKS):
        raise InputError(f"--link {request.link} is not known; choose measured or one of {', '.join(LINKS)}")
    if request.link == "given":
        given_link(request.latency_seconds, request.gigabytes_per_second)
    own, batch = request.config.lightning.settings, request.config.recipe.batch_size
    if not own and batch < 2:  # noqa: PLR2004  the slope over the batch size needs two
        raise InputError(f"recipe.batch_size={batch} leaves no smaller batch to profile; use at least 2")
    if not own and request.config.recipe.batch_scaling == "strong" and max(request.devices) > batch:
        fault = f"--devices {max(request.devices)} exceeds recipe.batch_size={batch} under strong scaling"
        raise InputError(f"{fault}; a device needs a sample per step: use at most {batch} devices")
    trainer = own.get("trainer", {})
    is_endless = trainer.get("max_epochs") == -1 and trainer.get("max_steps", -1) == -1
    if own and (is_endless or ends_by_time(trainer)):
        fault = "the length of the training is not known: a time limit ends it, or nothing does"
        raise InputError(fault, hint=LENGTH_HINT, setting="trainer")
    ranks = PROFILE_RANKS if request.link == "measured" else 1
    overrides = [f"execution.num_devices={ranks}", "execution.num_nodes=1", "speedup.baseline=none"]
    if request.config.execution.compile == "auto":  # as several devices run; one GPU alone would get a CUDA graph
        overrides.append("execution.compile=off")
    (config,) = configure(request.config, [overrides])
    try:
        return config, preflight.check_run(config, environment)
    except InputError as error:
        if ranks == 1:
            raise
        raise InputError(
            f"{error}; the profile needs two devices to measure their interference; or name a link, such as "
            "--link ethernet25, to profile one device"
        ) from error


@flow(name="paceline-advise", flow_run_name="advise {request.config.name}", persist_result=False)
@guard_flow
def run_advise(request: AdviseRequest) -> dict[str, Any]:
    """Predict the speedup on more devices, and rank changes of the execution.

    Args:
        request: The run, and the devices to predict.
    """
    started = time.monotonic()
    environment = Environment()
    if request.config.lightning.settings and is_from_api():
        request = request.model_copy(update={"config": read_again(request.config, None, environment)})
    config, checked = preflight.result_of(check_advise, request, environment)
    with open_cluster(config.cluster, demand_of([config.execution], checked.plan.accelerator), environment) as address:
        checked = preflight.confirm_on_cluster(config, checked, address)
        prepared = None if config.lightning.settings else _prepare(config, environment, address)
        if prepared is None:
            workload = lightning_fingerprint(request.config.lightning)
        else:
            workload = workload_fingerprint(config.workload, prepared.fingerprint, checked.weights)
        with new_run(request.config, environment, checked.experiment_id, "advise", workload) as handle:
            if prepared is not None:
                tracking.log_dataset(handle, prepared, config.data.source)
                checked = measure_plan(config, checked, prepared, handle.run_id, environment, address)
            plan = checked.plan
            job = train_job(config, checked, prepared, handle.run_id, environment)
            if prepared is None:
                prepare_own(job, address)
                job = with_partitions(job, address)
            measured = measure(job.model_copy(update={"measurement": _profiling(config, plan, request)}), address)
            moved = measure(job.model_copy(update={"measurement": _moves(config, plan)}), address)
            if request.link == "measured":
                link = fit_link([timing for timing in measured.all_reduces if timing.num_bytes > TOKEN_BYTES])
            elif request.link == "given":
                link = given_link(request.latency_seconds, request.gigabytes_per_second)
            else:
                link = LINKS[request.link]
            profile = _profile(config, plan, prepared, measured)
            run = {"run_id": handle.run_id, "experiment": handle.experiment, "workload": workload}
            result = _advise(request, profile, link, moved, **run, seconds=time.monotonic() - started)
            checks = past_checks(handle)
            metrics: dict[str, float | None] = {
                Metric.forecast(prediction.scaling, prediction.num_devices, name): getattr(prediction, name)
                for prediction in result.predictions
                for name in ("ratio", "low", "high")
            }
            tracking.log_facts(handle, metrics, {Tag.EXECUTION: execution_of(plan), Tag.BOUND: result.bound})
            tracking.log_document(handle, Artifact.ADVICE, result.model_dump(mode="json"))
            log_report(handle, render_advise(result, checks), draw_advise(result, checks))
    table = advise_table(result)
    publish(table, "advice", "What more devices would give")
    rows = [list(row) for row in table]
    # The JSON of `paceline advise`; names and shape are the public contract.
    return result.model_dump(mode="json", exclude={"preset"}) | {"tracking_uri": handle.public_uri, "table": rows}


def _prepare(config: Config, environment: Environment, address: str) -> PreparedSet:
    stage, seconds = with_retries(prepare, config.limits), config.limits.prepare_seconds
    return stage(config.stored_data, str(environment.root), address, seconds)


def _profiling(config: Config, plan: Plan, request: AdviseRequest) -> Measurement:
    """Arms of one device at several batch sizes, and of several devices without, with partial and with full syncing."""
    if config.lightning.settings:
        message_bytes = (TOKEN_BYTES, *MESSAGE_BYTES) if plan.world_size > 1 else ()
        return Measurement(arms={}, of_module="profile", all_reduce_bytes=message_bytes)
    batch = config.recipe.batch_size
    sizes = {batch, max(1, batch // 2), max(1, batch // max(*request.devices, MIN_PARTS))}
    single = _single(plan)
    points = {f"batch {size}": single.model_copy(update={"batch_size": size}) for size in sorted(sizes - {batch})}
    arms = {"baseline": single.model_copy(update={"batch_size": batch})}
    if plan.world_size == 1:
        half = points.pop(f"batch {max(1, batch // 2)}")
        return Measurement(arms=arms | {"candidate": half} | points)
    arms |= points
    for size in sorted(sizes):
        several = single.model_copy(update={"num_devices": PROFILE_RANKS, "batch_size": size})
        for variant in ("no_sync", "token_sync", "full"):
            arms[f"{variant} {size}"] = several.model_copy(update={"variant": variant})
    arms["candidate"] = arms.pop(f"full {batch}")
    return Measurement(arms=arms, all_reduce_bytes=(TOKEN_BYTES, *MESSAGE_BYTES))


def _moves(config: Config, plan: Plan) -> Measurement:
    """Arms of the execution on one device, and of each single change of it."""
    if config.lightning.settings:
        return Measurement(arms={}, of_module="moves", can_leave_out=True)
    batch = config.recipe.batch_size
    unchanged = _single(plan).model_copy(update={"batch_size": batch})
    changes: dict[str, dict[str, Any]] = {
        f"recipe.batch_size={2 * batch}": {"batch_size": 2 * batch},
        "execution.precision=bf16-mixed": {"precision": "bf16-mixed"},
        "execution.precision=32-true": {"precision": "32-true"},
        "execution.memory_format=channels_last": {"memory_format": "channels_last"},
        "execution.loading=resident": {"loading": "resident"},
        "execution.loading=streaming": {"loading": "streaming"},
        FASTER_INPUT: {"variant": "synthetic_input"},
    }
    if not plan.activation_checkpointing and (has_compiler() or plan.accelerator == "gpu"):
        changes["execution.compile=step"] = {"compile": "step"}
    if can_capture(plan):
        changes["execution.compile=graph"] = {"compile": "graph"}
    arms = {name: unchanged.model_copy(update=change) for name, change in changes.items()}
    different = {name: arm for name, arm in arms.items() if arm != unchanged}
    candidate = different.pop(next(iter(different)))
    return Measurement(arms={"baseline": unchanged, "candidate": candidate} | different, can_leave_out=True)


def _single(plan: Plan) -> Arm:
    return arm_of(plan).model_copy(update={"num_devices": 1, "strategy": "ddp"})


def _profile(config: Config, plan: Plan, prepared: PreparedSet | None, measured: MeasureResult) -> DeviceProfile:
    is_cpu, probe = plan.accelerator == "cpu", measured.probe
    threads = f", {plan.num_threads} thread{'s' if plan.num_threads > 1 else ''}" if is_cpu else ""
    interference = device_profile.measure_interference(probe, measured.all_reduces) if plan.world_size > 1 else None
    if prepared is None:
        assert measured.length is not None
        length = measured.length
    else:
        length = TrainingLength(num_train=prepared.num_train, num_epochs=config.recipe.num_epochs)
    return DeviceProfile(
        points=device_profile.profile_of(probe),
        gradient_bytes=measured.gradient_bytes,
        batch_size=probe.samples_per_step["baseline"],
        **dict(length),
        company=interference,
        label=f"{plan.device_name}{threads}, {_single(plan).label}",
        num_threads=plan.num_threads if is_cpu else None,
    )


def _advise(
    request: AdviseRequest, profile: DeviceProfile, link: Link, moved: MeasureResult, **run: Any
) -> AdviseResult:
    price, forecast = request.config.speedup.price_per_device_hour, Forecast(profile, link)
    predictions: list[Prediction] = []
    for scaling in ("strong", "weak"):
        for number in sorted(set(request.devices)):
            if scaling == "weak" or number <= profile.batch_size:
                predictions.append(forecast.predict(number, scaling, price=price))
            else:
                get_run_logger().warning("No strong scaling to %d devices: a step has fewer samples", number)
    kind, probe, deadline = scaling_of(request.config), moved.probe, request.deadline_seconds
    compiled = any(arm.compile == "step" for arm in (probe.baseline, probe.candidate, *probe.others.values()))
    left_out = ({} if compiled else {"execution.compile=step": "no C++ compiler was found"}) | probe.left_out
    return AdviseResult(
        **run,
        preset=request.preset,
        profile=profile,
        link=link,
        predictions=tuple(predictions),
        limits=tuple(forecast.limits(scaling) for scaling in ("strong", "weak")),
        bound=next(p for p in reversed(predictions) if p.scaling == kind).bound,
        advice=device_profile.rank_moves(device_profile.gains(probe), left_out),
        cheapest=None if deadline is None else forecast.cheapest(kind, deadline, price),
    )
