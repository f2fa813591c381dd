"""Everything that can be known to be wrong before any work starts. Leaves nothing behind when it refuses."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.conf.config import SELF_CONTAINED_BASELINES, Config
from paceline.conf.environment import Environment
from paceline.conf.load import check_own
from paceline.flows.checks.pretrained import check_weights
from paceline.flows.checks.training_host import training_host
from paceline.flows.lifecycle.prefect_api import check_prefect
from paceline.tasks.cluster.kinds import kind_of
from paceline.tasks.cluster.user_packages import require_packages
from paceline.tasks.data.key import describe
from paceline.tasks.errors import InputError
from paceline.tasks.files import nearest_existing
from paceline.tasks.records import Hardware, Plan, Pretrained
from paceline.tasks.track.connectivity import check_reachable
from paceline.tasks.train.launch.placement import inspect
from paceline.tasks.train.plan import resolve

RESNETS = ("resnet18", "resnet50")
RESNET_HALVED = 32
"""Pixels: they halve images five times."""


@dataclass(frozen=True)
class PreflightResult:
    """What the checks found out."""

    plan: Plan
    hardware: Hardware
    experiment_id: str
    num_train: int
    """Samples of the training split, as listed."""
    pretrained: Pretrained | None = None
    """Weights to begin with; None to begin by the seed."""

    @property
    def weights(self) -> str | None:
        """sha256 of those."""
        return self.pretrained.sha256 if self.pretrained else None


class Beginner(Protocol):
    """Begins what a run needs, while the rest of its input is checked."""

    def begin_api(self) -> None:
        """The servers are there."""

    def begin_cluster(self, plan: Plan) -> None:
        """Nothing is wrong with devices and data."""


def check(config: Config, site: Environment, beginner: Beginner | None = None) -> PreflightResult:
    """Check devices, servers, data and stores; what is told at once first.

    Args:
        config: of the run.
        site: this machine's facts.
        beginner: is told how far the checks are.

    Raises:
        ConfigError: the package of a source or a model is not installed here, or they do not fit.
        InputError: one line with the value, the rule and the fix.
    """
    check_own(config)  # of a form nobody has done so yet
    found = training_host(config, site)
    if config.cluster.address is not None:
        require_packages(config.cluster.address, config.packages)
    resolve(config, found, 0)  # what devices cannot do needs no data to be told
    check_prefect(site)
    _check_home(site)
    check_reachable(site.tracking_uri)
    if beginner is not None:
        beginner.begin_api()
    listing = describe(config.data)
    plan = resolve(config, found, listing.num_train)
    _check_batch(config, listing.num_train)
    _check_last_batch(config, listing.num_train)
    _check_test(config, listing.num_test)
    if beginner is not None:
        beginner.begin_cluster(plan)
    pretrained = check_weights(config, listing, site)
    experiment_id = _check_store(config, site)
    if config.speedup.baseline not in SELF_CONTAINED_BASELINES:
        from paceline.flows.checks.baseline import check_baseline

        check_baseline(config, site)
    return PreflightResult(plan, found, experiment_id, listing.num_train, pretrained)


def check_servers(config: Config, site: Environment) -> str:
    """Check the Prefect server, the state directory and the MLflow store; the experiment's id.

    Raises:
        InputError: one line with the value, the rule and the fix.
    """
    check_prefect(site)
    _check_home(site)
    return _check_store(config, site)


def _check_store(config: Config, site: Environment) -> str:
    from paceline.tasks.track import store  # MLflow: a second

    return store.check_store(site.tracking_uri, config.track.experiment, site.artifact_root)


def confirm_on_cluster(config: Config, cleared: PreflightResult, address: str) -> PreflightResult:
    """What was cleared, once the cluster is there: which hardware Slurm gives is not known before, nor its packages.

    Raises:
        InputError: the hosts that came cannot do what is asked, or lack a package of the user's.
    """
    if address != config.cluster.address:  # whose workers have been asked
        require_packages(address, config.packages)
    if kind_of(config.cluster).has_known_hardware:
        return cleared
    found = inspect(config, address)
    return replace(cleared, plan=resolve(config, found, cleared.num_train), hardware=found)


def plan_like(config: Config, cleared: PreflightResult, hardware: Hardware) -> Plan:
    """The plan of a configuration with another recipe or model than the one that was cleared, on the same data.

    Raises:
        InputError: the hardware or the data cannot do what is asked.
    """
    plan = resolve(config, hardware, cleared.num_train)
    _check_batch(config, cleared.num_train)
    _check_last_batch(config, cleared.num_train)
    return plan


def _check_batch(config: Config, num_train: int) -> None:
    ranks = config.global_batch_size // config.recipe.batch_size
    if config.global_batch_size > num_train:
        raise InputError(
            f"recipe.batch_size={config.recipe.batch_size} ({config.global_batch_size} over all ranks) exceeds the "
            f"{num_train} training samples; use at most {num_train // ranks}"
        )


def _check_last_batch(config: Config, num_train: int) -> None:
    """Batch norm needs two values of a channel, and small images leave one in each sample behind a ResNet's layers."""
    size, ranks = config.global_batch_size, config.execution.world_size
    rest = num_train % size
    if config.model.name in RESNETS and config.data.image_size <= RESNET_HALVED and 0 < rest < 2 * ranks:
        raise InputError(
            f"recipe.batch_size={config.recipe.batch_size} leaves a last batch of {rest} of the {num_train} "
            f"training samples, and a device needs two with {config.model.name} on images of at most {RESNET_HALVED} "
            "pixels; use another batch_size or larger images"
        )


def _check_test(config: Config, num_test: int) -> None:
    if num_test == 0:
        raise InputError(
            f"data.test_fraction={config.data.test_fraction} leaves no test samples, and a run is evaluated on them; "
            "raise it or give the source a test split"
        )


def _check_home(site: Environment) -> None:
    place = nearest_existing(site.root)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"PACELINE_HOME={site.root} cannot be written; set it to a directory of yours")
