"""The sweep: concurrent trials of one recipe on the same prepared data, each in a run nested in the sweep's."""

import threading
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import replace
from typing import Any

from prefect import flow, get_run_logger

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.load import ConfigError, make_config
from paceline.flows.checks import preflight
from paceline.flows.checks.lightning import configure
from paceline.flows.checks.measured_plan import measure_plan, train_job
from paceline.flows.checks.space import require_space_for_rest
from paceline.flows.lifecycle import mlflow_views
from paceline.flows.lifecycle.mlflow_run import open_run
from paceline.flows.lifecycle.outage import guard_flow, publish, with_retries
from paceline.flows.lifecycle.overlap import cancel_older
from paceline.flows.run.lightning import prepare_own
from paceline.flows.sweep.trial import SweepContext, SweepPlan, SweepRequest, colocation_on, run_trial
from paceline.tasks.cluster.client import count_workers
from paceline.tasks.cluster.kinds import open_cluster
from paceline.tasks.data.prefect_tasks import prepare
from paceline.tasks.disk_space import require_space
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.fingerprint import lightning_fingerprint, workload_fingerprint
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.report.sweep_report import draw_sweep, render_sweep, sweep_notes, trial_line
from paceline.tasks.scores import SCORE_OF_TASK, SCORE_WORDS
from paceline.tasks.speedup.study.pairs import figures_of
from paceline.tasks.sweep.concurrency import Colocation, plan_concurrency
from paceline.tasks.sweep.optuna_study import Search, TrialStore
from paceline.tasks.sweep.records import SweepResult, Trial
from paceline.tasks.sweep.space import Parameter, most_epochs, num_proposals, parse_parameters
from paceline.tasks.track import run as tracking
from paceline.tasks.track.ui_views import view_of_sweep
from paceline.tasks.train.autotune.choice import LAYER_SETTINGS

JOURNAL = "trials.journal"
NETWORK = {"model.name", "model.width", "model.depth"}
SUMMARY = ("run_id", "experiment", "sampler", "pruner", "score_name", "occupancy", "seconds")
TRIAL = ("number", "run_id", "status", "score", "values", "restarts", "seconds", "error")
LOOK_SECONDS = 1.0  # interval of checks for finished trials; bounds the delay of a signal


@preflight.reusable
def check_sweep(request: SweepRequest, environment: Environment, *, resume: str | None = None) -> SweepPlan:
    """Check everything before any work starts, with the ends of each parameter's range."""
    for name, number in (("--trials", request.num_trials), ("--at-once", request.at_once)):
        if number is not None and number < 1:
            raise InputError(f"{name} {number} is not above 0; give 1 or more")
    if request.is_own:
        _check_own(request)
    elif request.objective is not None:
        fault = f"--{request.objective.goal} is for your own Lightning code, and {request.preset} is a preset"
        raise InputError(fault, hint=f"remove --{request.objective.goal}", setting=f"--{request.objective.goal}")
    elif request.config.data.validation_fraction == 0:
        fault = "data.validation_fraction=0 leaves no samples to compare trials by, and the test split must not choose"
        raise InputError(f"{fault}; hold some out, as in data.validation_fraction=0.1")
    texts = [f"{setting}={values}" for setting, values in request.parameters.items()]
    parameters = parse_parameters(texts, is_own=request.is_own)
    num_trials = num_proposals(request.num_trials, request.sampler == "grid", parameters)
    config = make_config(request.config, ["speedup.baseline=none", "speedup.diagnose=false", "track.register=null"])
    if request.is_own:
        checked = preflight.check_lightning(config, environment)
        for changed in configure(config, [[one.override(value)] for one in parameters for value in one.test_values()]):
            preflight.plan_on(changed, checked.hardware, 0)
    else:
        _check_parameters(config, parameters)
        checked = preflight.check(config, environment)
        _check_parameters(config, parameters, checked)
    num_workers = count_workers(config.cluster.address) if config.cluster.address is not None else None
    accelerator, at_once = checked.plan.accelerator, request.at_once
    room = plan_concurrency(config, checked.hardware, accelerator, num_trials, at_once, num_workers)
    if resume is None:  # a resume has some of them
        size = checked.checkpoint_bytes
        checkpoints = num_trials * size.kept + room.num_at_once * size.written
        require_space(config.limits, environment.root, {"checkpoints of all trials": checkpoints})
    return SweepPlan(request, config, parameters, num_trials, checked, room)


def _check_own(request: SweepRequest) -> None:
    """Raise InputError for what a sweep of the user's own Lightning code cannot do, or needs."""
    if request.objective is None:
        fault = "a sweep of your own Lightning code needs a metric to compare its trials by"
        raise InputError(
            fault, hint="--minimize val_loss, or --maximize with a metric of self.log", setting="--minimize"
        )
    if request.pruner != "none":
        fault = f"--pruner {request.pruner} cannot be used with your own Lightning code so far"
        raise InputError(fault, hint="remove --pruner", setting="--pruner")


def _check_parameters(
    config: Config, parameters: tuple[Parameter, ...], checked: preflight.PreflightResult | None = None
) -> None:
    """Check the ends of each parameter's range, after the preflight check also on the hardware and the data."""
    for parameter in parameters:
        if parameter.setting == "model.pretrained":
            raise InputError("--param model.pretrained: all trials begin with the same weights; make a sweep for each")
        if config.model.pretrained is not None and parameter.setting in NETWORK:
            fault = f"--param {parameter.setting}: model.pretrained={config.model.pretrained} fits one network"
            raise InputError(f"{fault}; sweep other settings, or begin by the seed")
        for value in parameter.test_values():
            try:
                changed = make_config(config, [parameter.override(value)])
                _check_comparable(config, changed)
                if checked is not None:
                    preflight.plan_on(changed, checked.hardware, checked.num_train)
            except (ConfigError, InputError) as error:
                raise InputError(f"--param {parameter.setting}: {error}") from error


def _check_comparable(config: Config, changed: Config) -> None:
    if changed.model.task != config.model.task:
        raise InputError(
            f"model.name={changed.model.name} is judged by {SCORE_WORDS[SCORE_OF_TASK[changed.model.task]]}, and "
            f"{config.model.name} by {SCORE_WORDS[SCORE_OF_TASK[config.model.task]]}; make a sweep for each"
        )
    if changed.packages != config.packages:
        raise InputError(
            f"model.name={changed.model.name} and {config.model.name} are of different packages; make a sweep for each"
        )


@flow(name="paceline-sweep", flow_run_name="sweep {request.config.name}", persist_result=False)
@guard_flow
def run_sweep(request: SweepRequest, resume: str | None = None) -> dict[str, Any]:
    """Run trials of one recipe with other settings, several at once, and report the best.

    Args:
        request: Parameters to vary, and settings that all trials share.
        resume: Id of an unfinished sweep to resume.
    """
    started = time.monotonic()
    environment = Environment()
    planned = preflight.result_of(check_sweep, request, environment, resume=resume)
    cancel_older()
    config, room = planned.config, planned.room
    with open_cluster(config.cluster, room.demand, environment) as address:
        checked = preflight.confirm_on_cluster(config, planned.checked, address)
        limits, prepared = config.limits, None
        workload = lightning_fingerprint(config.lightning)
        if not request.is_own:
            stage, how = with_retries(prepare, limits), (limits.prepare_seconds, resume is not None)
            prepared = stage(config.stored_data, str(environment.root), address, *how)
            if not prepared.num_validation:
                fault = "the prepared set has no validation samples, and trials are compared on them"
                raise RunError(f"{fault}; raise data.validation_fraction")
            workload = workload_fingerprint(config.workload, prepared.fingerprint, checked.weights)
        experiment_id = planned.checked.experiment_id
        with open_run("sweep", request.config, environment, experiment_id, workload, resume, request) as parent:
            share = replace(checked, plan=preflight.plan_on(config, room.share, checked.num_train), hardware=room.share)
            if prepared is None:
                job = train_job(config, share, None, parent.run_id, environment, resume=resume is not None)
                prepare_own(job, address)
                plan = share.plan
            else:
                plan = measure_plan(config, share, prepared, parent.run_id, environment, address).plan
            log = get_run_logger()
            log.info("%d trials, %s at once: %s", planned.num_trials, room.at_once.value, room.at_once.reason)
            for name, choice in plan.reasons.items():
                log.info("Each has execution.%s=%s: %s", name, choice.value, choice.reason)
            search = Search(
                parameters=planned.parameters,
                sampler=request.sampler,
                pruner=request.pruner,
                num_trials=planned.num_trials,
                num_epochs=most_epochs(config, planned.parameters),
                seed=config.seed,
                goal=request.objective.goal if request.objective else "maximize",
            )
            work = SweepContext(
                **vars(replace(planned, checked=checked)),
                address=address,
                environment=environment,
                parent=parent,
                prepared=prepared,
                layers={name: getattr(plan, name) for name in LAYER_SETTINGS if name in plan.reasons},
                proposer=TrialStore(environment.root / "runs" / parent.run_id / JOURNAL, search),
                stopped=threading.Event(),
            )
            colocation, no_colocation = colocation_on(work, request.config.speedup.baseline)
            _run_all(work, planned.num_trials)
            result, summary = _log(work, colocation, no_colocation, time.monotonic() - started)
            if result.trials and all(trial.status == "failed" for trial in result.trials):
                raise RunError(f"all {len(result.trials)} trials failed; the last error: {result.trials[-1].error}")
    publish([("", note) for note in sweep_notes(result)], "sweep", "What the trials gave")
    mlflow_views.link(summary["view"], "The trials of this sweep")
    return summary | {"result": result.model_dump(mode="json")}


def _run_all(work: SweepContext, num_trials: int) -> None:
    """Run the requested number of trials; start a new one as soon as one has ended."""
    waiting = deque(work.proposer.resumable_trials())
    running: set[Future[Trial | None]] = set()
    with ThreadPoolExecutor(work.room.num_at_once, "trial") as pool:
        try:
            while True:
                while len(running) < work.room.num_at_once:
                    proposal = waiting.popleft() if waiting else work.proposer.propose()
                    if proposal is None:
                        break
                    get_run_logger().info("Trial %d: %s", proposal.number, " ".join(work.overrides(proposal)))
                    running.add(pool.submit(copy_context().run, run_trial, work, proposal))
                if not running:
                    return
                ended, running = wait(running, LOOK_SECONDS, FIRST_COMPLETED)
                for trial in filter(None, (future.result() for future in ended)):
                    log = get_run_logger().warning if trial.status == "failed" else get_run_logger().info
                    trials = work.proposer.trials()
                    num_ended = len(trials)
                    log(
                        "%d of %d trials: trial %d, %s",
                        num_ended,
                        num_trials,
                        trial.number,
                        trial_line(trial, work.score_name),
                    )
                    ended_ids = [one.run_id for one in trials]
                    num_left = num_trials - num_ended - len(running)  # those that run are on the disk already
                    require_space_for_rest(work.config, work.environment, [(ended_ids, num_left)])
        except BaseException:
            work.stopped.set()  # the pool waits for its threads
            raise


def _log(
    work: SweepContext, colocation: Colocation | None, no_colocation: str, seconds: float
) -> tuple[SweepResult, dict[str, Any]]:
    """Record the sweep in its run, with the reason for no measurement of colocation; the JSON of `paceline sweep`.

    Its names and shape are the public contract.
    """
    parent, hardware = work.parent, work.checked.hardware
    result = SweepResult(
        run_id=parent.run_id,
        experiment=parent.experiment,
        preset=work.request.preset,
        parameters=work.parameters,
        sampler=work.request.sampler,
        pruner=work.request.pruner,
        at_once=work.room.at_once,
        num_epochs=most_epochs(work.config, work.parameters),
        score_name=work.score_name,
        objective=work.request.objective,
        trials=work.proposer.trials(),
        colocation=colocation,
        no_colocation=no_colocation,
        seconds=seconds,
        hardware=mlflow_views.describe_host(hardware),
        versions=mlflow_views.known_versions(),
    )
    mlflow_views.log_result(parent, Artifact.SWEEP, result, hardware, render_sweep, draw_sweep)
    settings, best = [parameter.setting for parameter in result.parameters], result.best
    view = mlflow_views.share(parent, view_of_sweep(parent.run_id, settings))
    summary: dict[str, Any] = {
        **{name: getattr(result, name) for name in SUMMARY},
        "tracking_uri": parent.public_uri,
        "at_once": result.at_once.value,
        "best": _plain(result, best) | {"test_score": best.test_score} if best else None,
        "trials": [_plain(result, trial) for trial in result.trials],
        "num_done": result.num("done"),
        "num_pruned": result.num("pruned"),
        "num_failed": result.num("failed"),
        "speedup": _speedup(result),
        "report": Artifact.REPORT,
        "view": view,
    }
    tracking.log_document(parent, Artifact.SUMMARY, summary)
    tags = {Tag.LAYOUT: colocation.layout, Tag.CONTAMINATED: str(colocation.contaminated)} if colocation else {}
    if best is not None:
        tags |= {Tag.BEST_RUN_ID: best.run_id or "", Tag.BEST: " ".join(result.overrides(best))}
    tracking.log_facts(parent, _metrics(result), tags)
    return result, summary


def _metrics(result: SweepResult) -> dict[str, float | None]:
    best, (speedup, low, high) = result.best, figures_of(result.speedup)
    return {
        Metric.SWEEP_NUM_TRIALS: len(result.trials),
        Metric.SWEEP_NUM_PRUNED: result.num("pruned"),
        Metric.SWEEP_NUM_FAILED: result.num("failed"),
        Metric.SWEEP_SECONDS: result.seconds,
        Metric.SWEEP_OCCUPANCY: result.occupancy,
        Metric.SPEEDUP: speedup,
        Metric.SPEEDUP_LOW: low,
        Metric.SPEEDUP_HIGH: high,
        Metric.SWEEP_BEST_SCORE: best.score if best else None,
        Metric.SWEEP_BEST_TEST_SCORE: best.test_score if best else None,
    }


def _plain(result: SweepResult, trial: Trial) -> dict[str, Any]:
    return {name: getattr(trial, name) for name in TRIAL} | {
        "overrides": list(result.overrides(trial)),
        "num_epochs": None if result.objective else len(trial.scores),
    }


def _speedup(result: SweepResult) -> dict[str, Any]:
    speedup, colocation = result.speedup, result.colocation
    if speedup is None or colocation is None:
        return {"ratio": None, "low": None, "high": None, "layout": None, "reason": result.no_colocation}
    ratios = {name: getattr(colocation, name) for name in ("over_alone", "over_together", "over_whole")}
    return {
        "ratio": speedup.value,
        "low": speedup.low,
        "high": speedup.high,
        "layout": colocation.layout,
        "num_rounds": colocation.num_rounds,
        "contaminated": colocation.contaminated,
        **{name: ratio and ratio.model_dump() for name, ratio in ratios.items()},
    }
