"""Checks of a run before any work starts, whose result the flow reuses. A refused run leaves nothing behind."""

import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar, cast

from paceline.conf.config import SELF_CONTAINED_BASELINES, Config
from paceline.conf.data import Data
from paceline.conf.environment import Environment
from paceline.conf.load import check_own
from paceline.flows.checks.origin import check_code, check_origin
from paceline.flows.checks.prestart import Prestart
from paceline.flows.checks.pretrained import check_weights
from paceline.flows.checks.space import CheckpointBytes, check_space, is_prepared
from paceline.flows.lifecycle.prefect_api import check_prefect, prepare_api
from paceline.tasks.cluster.kinds import kind_of
from paceline.tasks.cluster.tls import certificates
from paceline.tasks.cluster.user_packages import require_packages
from paceline.tasks.data.key import describe
from paceline.tasks.data.listing import Listing
from paceline.tasks.data.partitions import list_on
from paceline.tasks.disk_space import require_space
from paceline.tasks.errors import InputError
from paceline.tasks.files import nearest_existing
from paceline.tasks.names import Tag
from paceline.tasks.records.data import Pretrained
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.track.connectivity import check_reachable
from paceline.tasks.train.launch.module_data import require_code
from paceline.tasks.train.launch.placement import inspect
from paceline.tasks.train.plan import resolve

ROLES = ("run", "arm", "trial")  # roles of runs that a run can be divided by
RESNETS = ("resnet18", "resnet50")
RESNET_HALVED = 32  # pixels: they halve images five times
Check = TypeVar("Check", bound=Callable[..., Any])
Result = TypeVar("Result")
_latest: ContextVar[tuple[object, object, object, Any] | None] = ContextVar("latest", default=None)
"""The latest check that passed: its name, its request, its environment and its result."""


@dataclass(frozen=True)
class PreflightResult:
    """Facts from the checks of a run."""

    plan: Plan
    hardware: Hardware
    experiment_id: str
    num_train: int  # samples of the training split, as listed
    pretrained: Pretrained | None = None  # initial weights; None for those of the seed
    checkpoint_bytes: CheckpointBytes = field(default_factory=CheckpointBytes)

    @property
    def weights(self) -> str | None:
        """sha256 of the initial weights."""
        return self.pretrained.sha256 if self.pretrained else None


def reusable(check: Check) -> Check:
    """Store the result of a check for the flow that starts next, see `result_of`."""

    @wraps(check)
    def call(request: object, environment: Environment, /, **options: Any) -> Any:
        result = check(request, environment, **options)
        _latest.set((check.__qualname__, request, environment, result))
        return result

    return cast(Check, call)


def result_of(check: Callable[..., Result], request: object, environment: Environment, **options: Any) -> Result:
    """Take the result of the latest `reusable` check if it had this request and environment, else check now.

    A deployment checks now, with these options.
    """
    latest = _latest.get()
    if latest is not None and latest[:3] == (check.__qualname__, request, environment):
        result: Result = latest[3]
    else:
        result = check(request, environment, **options)
    _latest.set(None)  # valid for one flow: the data or servers may change before the next one
    return result


@reusable
def check_lightning(config: Config, environment: Environment, *, prestart: Prestart | None = None) -> PreflightResult:
    """Check devices, servers and stores of a training of the user's own Lightning code; raise InputError."""
    check_code(config.lightning, environment)
    hardware = training_host(config, environment)
    plan = resolve(config, hardware, 0)
    if config.cluster.address is not None:
        require_code(config.lightning, config.cluster.address)
    check_prefect(environment)
    _check_home(environment)
    check_reachable(environment.tracking_uri)
    require_space(config.limits, environment.root, {})
    if prestart is not None:
        prepare_api(environment)
        prestart.start_cluster(plan, prepares=config.lightning.has_partitions)
    experiment_id = _check_store(config, environment)
    _check_baseline(config, environment)
    return PreflightResult(plan, hardware, experiment_id, 0)


@reusable
def check(
    config: Config,
    environment: Environment,
    *,
    list_data: Callable[[Data], Listing] = describe,  # whose listings several checks can share
    prestart: Prestart | None = None,  # starts parts of the run after their checks
) -> PreflightResult:
    """Check devices, servers, data and stores, the quick checks first; raise ConfigError or InputError."""
    if config.lightning.settings:
        raise InputError("your own Lightning code cannot be used here so far", hint="paceline run", setting="lightning")
    check_own(config)  # the form of Prefect does not do this
    hardware = training_host(config, environment)
    if config.cluster.address is not None:
        require_packages(config.cluster.address, config.packages)
    plan = resolve(config, hardware, 0)  # refuses without the data what the devices cannot do
    check_prefect(environment)
    _check_home(environment)
    check_reachable(environment.tracking_uri)
    if prestart is not None:
        prestart.start_fork_server(plan)
        prepare_api(environment)  # early; the Prestart ends it if no flow uses it
    with list_on(config.cluster.address):
        listing = list_data(config.stored_data)
    plan = plan_on(config, hardware, listing.num_train)
    if listing.num_test == 0:
        fault = f"data.test_fraction={config.data.test_fraction} leaves no test samples, and a run is evaluated on them"
        raise InputError(f"{fault}; raise it or give the source a test split")
    checkpoint_bytes = check_space(config, listing, environment)
    if prestart is not None:
        prestart.start_cluster(plan, prepares=not is_prepared(listing, environment))
    pretrained = check_weights(config, listing, environment)
    experiment_id = _check_store(config, environment)
    _check_baseline(config, environment)
    return PreflightResult(plan, hardware, experiment_id, listing.num_train, pretrained, checkpoint_bytes)


def check_run(config: Config, environment: Environment, *, prestart: Prestart | None = None) -> PreflightResult:
    """Check a training of a preset or of own Lightning code; raise as `check` and `check_lightning`."""
    return (check_lightning if config.lightning.settings else check)(config, environment, prestart=prestart)


def _check_baseline(config: Config, environment: Environment) -> None:
    """Raise InputError if the named run is unknown, has not finished, or is not a training."""
    run_id = config.speedup.baseline
    if run_id in (*SELF_CONTAINED_BASELINES, "matched"):
        return
    from paceline.tasks.track.queries import get_runs  # MLflow: a second

    try:
        (run,) = get_runs(environment.tracking_uri, [run_id])
    except InputError as error:
        raise InputError(f"speedup.baseline: {error}") from error
    role = run.tags.get(Tag.ROLE, "")
    if role not in ROLES or run.status != "FINISHED":
        was = f"is a {role or 'foreign run'}" if role not in ROLES else f"is {run.status}"
        raise InputError(f"speedup.baseline={run_id} {was}; name a training that has finished (see paceline ui)")


def training_host(config: Config, environment: Environment) -> Hardware:
    """Hardware of the first training host; of a Slurm node, the requested hardware. Starts nothing."""
    check_origin(config.cluster, environment)
    certificates(config.cluster, environment)
    if config.cluster.address is not None:
        return inspect(config, config.cluster.address)
    kind = kind_of(config.cluster)
    kind.check()
    return kind.first_host(config, environment)


def check_servers(config: Config, environment: Environment) -> str:
    """Check the Prefect server, the state directory and the MLflow store; return the id of the experiment."""
    check_prefect(environment)
    _check_home(environment)
    return _check_store(config, environment)


def _check_store(config: Config, environment: Environment) -> str:
    from paceline.tasks.track import store  # MLflow: a second

    return store.check_store(environment.tracking_uri, config.track.experiment, environment.artifact_root)


def confirm_on_cluster(config: Config, checked: PreflightResult, address: str) -> PreflightResult:
    """Check the hardware that Slurm gave and the packages of a cluster's workers; raise InputError if they fail."""
    if address != config.cluster.address:  # `check` did this for a cluster that already ran
        require_packages(address, config.packages)
        if config.lightning.settings:
            require_code(config.lightning, address)
    if kind_of(config.cluster).has_known_hardware:
        return checked
    hardware = inspect(config, address)
    return replace(checked, plan=resolve(config, hardware, checked.num_train), hardware=hardware)


def plan_on(config: Config, hardware: Hardware, num_train: int) -> Plan:
    """Plan a configuration; raise InputError if the hardware or the number of training samples do not allow it."""
    plan = resolve(config, hardware, num_train)
    if config.lightning.settings:
        return plan
    size, batch = config.global_batch_size, config.recipe.batch_size
    if size > num_train:
        fault = f"recipe.batch_size={batch} ({size} over all ranks) exceeds the {num_train} training samples"
        raise InputError(f"{fault}; use recipe.batch_size={num_train // (size // batch)} or less")
    # Batch norm needs two values of a channel, and small images leave one in each sample behind a ResNet's layers.
    is_small = config.model.name in RESNETS and config.data.image_size <= RESNET_HALVED
    remainder = num_train % size
    if is_small and 0 < remainder < 2 * config.execution.world_size:
        raise InputError(
            f"recipe.batch_size={batch} leaves a last batch of {remainder} of the {num_train} "
            f"training samples, and a device needs two with {config.model.name} on images of at most {RESNET_HALVED} "
            "pixels; use another batch_size or larger images"
        )
    return plan


def _check_home(environment: Environment) -> None:
    place = nearest_existing(environment.root)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"PACELINE_HOME={environment.root} cannot be written; set it to a directory of yours")
