"""Checks of a study with arms before any work: training from scratch, fine-tuning, and a classifier on features."""

from functools import cache, partial

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.load import ConfigError, PlanArm, make_config
from paceline.flows.checks import preflight
from paceline.flows.checks.pretrained import check_layer, check_weights
from paceline.flows.study.linear_eval import fit_features
from paceline.flows.study.request import StudyRequest
from paceline.flows.study.trainings import PlannedArm, train_arm
from paceline.tasks.data.key import describe
from paceline.tasks.data.listing import Listing
from paceline.tasks.errors import InputError
from paceline.tasks.speedup.data_sheet import SHEETS
from paceline.tasks.speedup.study.no_gpu import FEATURES, SCRATCH, WAYS
from paceline.tasks.speedup.study.records import StudyArm

OWN_SECTIONS = ("model.", "recipe.")  # in which arms may differ


def check_arms(request: StudyRequest, environment: Environment) -> list[PlannedArm]:
    """Check everything before any work starts; raise InputError for the first fault."""
    _check_request(request)
    list_data = cache(describe)
    listing = list_data(request.config.data)
    _check_data(request.config, listing)
    base = make_config(request.config, ["speedup.baseline=none", "speedup.diagnose=false"])
    planned = []
    for name in WAYS:  # a stored request may have another order
        overrides, layer = request.arms[name].overrides, request.arms[name].linear_eval
        arm = StudyArm(name=name, overrides=tuple(overrides), group="", is_baseline=name == SCRATCH)
        try:
            config = make_config(base, overrides)
            if layer is not None:
                check_weights(config, listing, environment)  # first: a network without a backbone has no such layer
                shape = (config.data.image_size, config.data.image_size, listing.channels)
                check_layer(layer, config.model, shape, (len(listing.class_names), 0))
            checked = preflight.check(config, environment, list_data=list_data)
        except (ConfigError, InputError) as error:
            raise InputError(f"{name}: {error}") from error
        train_fn = train_arm if layer is None else partial(fit_features, layer=layer)
        planned.append(PlannedArm(arm, config, checked, train_fn))
    return planned


def _check_request(request: StudyRequest) -> None:
    _check_arms(request.arms)
    config = request.config
    if request.target is not None and not 0 < request.target <= 1:
        raise InputError(f"--target {request.target:g} is not an accuracy; give a share above 0, and at most 1")
    if request.gpu not in SHEETS:
        raise InputError(f"--gpu {request.gpu}: has no data sheet here; give one of {', '.join(SHEETS)}")
    if config.model.pretrained is None:
        raise InputError(
            "fine-tuning and features need weights to start from",
            hint="--pretrained RUN_ID, or model.pretrained=RUN_ID with paceline study",
            setting="model.pretrained",
        )
    if config.model.freeze != "none":
        raise InputError(f"model.freeze={config.model.freeze}: the arms differ in model.freeze; remove model.freeze")
    if config.execution.accelerator != "cpu":
        raise InputError(
            f"execution.accelerator={config.execution.accelerator} cannot be used with paceline no-gpu, which measures "
            f"on CPUs; remove execution.accelerator={config.execution.accelerator}"
        )
    if config.execution.num_nodes > 1:
        raise InputError(
            f"execution.num_nodes={config.execution.num_nodes}: all ways run on one host, which computes the features; "
            "use 1"
        )


def _check_arms(arms: dict[str, PlanArm]) -> None:
    if set(arms) != set(WAYS) or [name for name in WAYS if arms[name].linear_eval] != [FEATURES]:
        raise InputError(
            f"arms={', '.join(arms)}; a study with arms has {', '.join(WAYS)}, and linear_eval in {FEATURES} alone",
            hint="compare the plan with conf/plans/no-gpu.yaml",
            setting="--plan",
        )
    for name, arm in arms.items():
        wrong = [override for override in arm.overrides if not override.startswith(OWN_SECTIONS)]
        if wrong:
            raise InputError(
                f"arm {name}: {wrong[0]} is not a setting of model or recipe; arms share all other settings",
                hint=f"give {wrong[0]} to the study, and not to one arm",
                setting=wrong[0].partition("=")[0],
            )


def _check_data(config: Config, listing: Listing) -> None:
    if config.model.task != "classify":
        raise InputError(
            f"model.name={config.model.name} predicts pixels, which have no classifier on "
            "features; choose a network that classifies images"
        )
    if listing.target_names:
        raise InputError(
            f"data.source={config.data.source} has regression targets ({', '.join(listing.target_names)}), for which "
            "there is no classifier on features; choose a source with classes alone"
        )
    if not listing.num_validation:
        raise InputError(
            f"data.validation_fraction={config.data.validation_fraction} leaves no validation samples, on which the "
            "target is reached; raise it"
        )
