"""What each command prints with `--json` and what it reads, as JSON Schemas of draft 2020-12.

The records are made from those of the stages by the lists of keys that the commands use. They are made on demand,
because the modules with these lists need seconds for their imports.
"""

import argparse
from collections.abc import Collection
from types import GenericAlias
from typing import Any, Union

from pydantic import BaseModel, RootModel, TypeAdapter, create_model

from paceline.conf.config import Config
from paceline.tasks.records.record import Record

DIALECT = "https://json-schema.org/draft/2020-12/schema"
RUN: dict[str, Any] = {
    "run_id": str,
    "experiment": str,
    "tracking_uri": str,
    "seconds": float,
}  # of each command with a run in MLflow
KINDS: dict[Any, str] = {int: "integer", float: "number"}  # of the types of arguments; all others are texts


class Failure(Record):
    """The command ended with status 1 or 2. What it had printed before stays the last line."""

    error: str
    hint: str | None
    setting: str | None  # the setting, option or variable that is wrong


def _part(name: str, record: type[BaseModel], keys: Collection[str], /, **more: Any) -> Any:
    """A record of some fields of another one, and of more that replace or follow them."""
    fields = {key: field.annotation for key, field in record.model_fields.items() if key in keys} | more
    declared: dict[str, Any] = {key: (kind, ...) for key, kind in fields.items()}
    return create_model(name, __base__=Record, __doc__=None if record is Record else record.__doc__, **declared)


def _new(name: str, /, **fields: Any) -> Any:
    return _part(name, Record, (), **fields)


def _all(name: str, record: type[BaseModel], /, **more: Any) -> Any:
    return _part(name, record, record.model_fields, **more)


def _many(kind: Any) -> Any:
    return GenericAlias(tuple, (kind, ...))


def _run() -> list[Any]:
    from paceline.flows.run import lightning
    from paceline.flows.run.record import DATASET_KEYS, TRAIN_KEYS
    from paceline.flows.run.stages import Summary
    from paceline.tasks.records.data import PreparedSet, Pretrained
    from paceline.tasks.records.execution import Plan
    from paceline.tasks.records.record import Choice
    from paceline.tasks.records.training import ModuleResult, TrainResult
    from paceline.tasks.speedup.forecast.records import Check
    from paceline.tasks.speedup.limit_share import SHARES, LimitShare
    from paceline.tasks.speedup.nights.regression import RegressionVerdict

    shares = {key: LimitShare.model_fields[key].annotation for key in SHARES}
    shares["steady_samples_per_second"] = float | None
    texts: dict[str, Any] = {"alias": str | None, "gate": str, "champion_before": str | None}
    registered = _new("Registered", name=str, version=str | None, **texts)
    of_preset: dict[str, Any] = {
        "dataset": _part("Dataset", PreparedSet, DATASET_KEYS),
        "pretrained": Pretrained | None,
        "train": _part("Training", TrainResult, TRAIN_KEYS, **shares),
        "prediction": _all("CheckedForecast", Check, calibration=str) | None,
        "regression": RegressionVerdict | None,
        "registered": registered | None,
        "execution": _all("Execution", Plan, arithmetic=str | None),
    }
    of_own = {key: of_preset[key] for key in ("prediction", "regression", "registered")}
    of_own["train"] = _part("OwnTraining", ModuleResult, lightning.TRAIN_KEYS, **shares)
    shown = _new("Shown", config=Config, choices=dict[str, Choice])
    return [_all("Run", Summary, **of_preset), _all("OwnRun", lightning.OwnSummary, **of_own), shown]


def _study() -> list[Any]:
    from paceline.flows.study.record import ARM_SUMMARY, SUMMARY
    from paceline.tasks.measure.paired_ratio import Interval
    from paceline.tasks.speedup.study.records import ArmSummary, StudyResult

    ratios = ("ratio", "low", "high", "efficiency", "prediction_ratio", "accuracy")
    more: dict[str, Any] = {"name": str, "group": str, "run_id": str | None, "run_ids": tuple[str, ...]}
    more |= {"matches": bool | None}
    more |= dict.fromkeys(ratios, float | None) | {"confirmation": Interval | None}
    more_of_study: dict[str, Any] = RUN | {"report": str, "view": str}
    more_of_study["arms"] = _many(_part("StudyArm", ArmSummary, ARM_SUMMARY, **more))
    more_of_study["karp_flatt"] = dict[str, float] | dict[str, dict[str, float]] | None
    return [_part("Study", StudyResult, SUMMARY, **more_of_study), *_no_gpu()]


def _no_gpu() -> list[Any]:
    from paceline.flows.study.record import NO_GPU_SUMMARY
    from paceline.tasks.speedup.study.no_gpu import NoGpuResult

    return [_part("NoGpu", NoGpuResult, NO_GPU_SUMMARY, **RUN, report=str, view=str)]


def _sweep() -> list[Any]:
    from paceline.flows.sweep.flow import SUMMARY, TRIAL
    from paceline.tasks.sweep.concurrency import Colocation
    from paceline.tasks.sweep.records import SweepResult, Trial

    trial = _part("SweepTrial", Trial, TRIAL, overrides=tuple[str, ...], num_epochs=int | None)
    ends: dict[str, Any] = {"ratio": float, "low": float | None, "high": float | None, "layout": str}
    measured = ("num_rounds", "contaminated", "over_alone", "over_together", "over_whole")
    colocated = _part("SideBySide", Colocation, measured, **ends)
    alone = _new("NotSideBySide", **dict.fromkeys(ends, None), reason=str)
    of_sweep: dict[str, Any] = {
        **{"occupancy": float | None, "at_once": int, "trials": _many(trial)},
        **dict.fromkeys(("num_done", "num_pruned", "num_failed"), int),
        "best": _all("BestTrial", trial, test_score=float | None) | None,
        "speedup": colocated | alone,
    }
    return [_part("Sweep", SweepResult, SUMMARY, **RUN, **of_sweep, report=str, view=str)]


def _predict() -> list[Any]:
    from paceline.flows.predict.flow import EXECUTION
    from paceline.flows.predict.request import PredictRequest
    from paceline.tasks.predict.job import Parity
    from paceline.tasks.records.data import Reads
    from paceline.tasks.records.execution import Plan
    from paceline.tasks.records.prediction import ModulePredicted

    named = ("model", "source", "layer", "own_size")
    numbers = ("num_values", "num_samples", "num_rejected", "num_unread", "num_reused")
    of_images: dict[str, Any] = {
        **{"key": str, "model_digest": str, "model_recorded": bool, "task": str, "class_names": tuple[str, ...]},
        **dict.fromkeys(numbers, int),
        **dict.fromkeys(("accuracy", "mean_iou", "samples_per_second"), float | None),
        **{"out": str, "reads": Reads, "parity": Parity | None},
        "execution": _part("PredictExecution", Plan, EXECUTION),
    }
    of_own: dict[str, Any] = {
        **{"model": str, "key": str, "model_digest": str | None, "checkpoint": str | None, "packages": tuple[str, ...]},
        **{"out": str, "samples_per_second": float, "execution": Plan},
    }
    counted = ("num_samples", "num_batches", "columns")
    return [
        _part("Prediction", PredictRequest, named, **RUN, **of_images),
        _part("OwnPrediction", ModulePredicted, counted, **RUN, **of_own),
    ]


def _others() -> dict[str, list[Any]]:
    from paceline.flows.predict.classify import ClassifyRequest
    from paceline.tasks.clean.removal import CleanUp
    from paceline.tasks.doctor.figures import Measurements
    from paceline.tasks.doctor.finding import Finding
    from paceline.tasks.evaluate.linear_classifier import Fitted
    from paceline.tasks.judge.bisection import Bisection
    from paceline.tasks.judge.ledger import Ledger
    from paceline.tasks.judge.records import Judgement
    from paceline.tasks.speedup.compare import Comparison
    from paceline.tasks.speedup.forecast.records import AdviseResult
    from paceline.tasks.speedup.hardware_table import HardwareTable
    from paceline.tasks.watch.records import WatchResult

    fitted: dict[str, Any] = dict.fromkeys(("model", "model_digest", "layer"), str) | RUN
    fitted |= {"num_shared": int, "num_left_out": int, "classifiers": tuple[Fitted, ...]}
    found: dict[str, Any] = {"findings": tuple[Finding, ...], "counts": dict[str, int]}
    preset = _new("Preset", name=str, task=str, needs_data=bool, what=str)
    setting = _new("Setting", name=str, type=str, default=Any, help=str)
    sample = _new("Sample", name=str, labels=dict[str, str], value=float)
    listed = _new("Commands", commands=_many(_new("Command", name=str, help=str)))
    figures = dict[str, float | None]
    return {
        "classify": [_part("Classification", ClassifyRequest, ("train", "test"), **fitted)],
        "advise": [_part("Forecast", AdviseResult, {*AdviseResult.model_fields} - {"preset"}, tracking_uri=str)],
        "compare": [_all("ComparedRuns", Comparison, view=str)],
        "hardware": [HardwareTable],
        "watch": [_new("Watched", accounts=tuple[WatchResult, ...])],
        "judge": [Judgement, _new("Ledgers", ledgers=_many(_all("ListedLedger", Ledger, next_level=float)))],
        "bisect": [Bisection],
        "evidence": [_new("Evidence", file=str, num_bytes=int, sha256=str, figures=figures)],
        "clean": [_all("FreedSpace", CleanUp, freed_bytes=int)],
        "doctor": [_new("Examination", **found, measurement=Measurements | None)],
        "presets": [_new("Presets", presets=_many(preset))],
        "settings": [_new("Settings", settings=_many(setting))],
        "metrics": [_new("Samples", samples=_many(sample))],
        "serve": [_new("Deployments", deployments=tuple[str, ...], server=str)],
        "ui": [_new("Address", address=str)],
        "completion": [_new("Script", script=str)],
        "schema": [listed, RootModel[dict[str, Any]]],
    }


def output_schema(name: str) -> dict[str, Any]:
    """JSON Schema of the line that a command prints with `--json`."""
    large = {
        "run": _run,
        "study": _study,
        "no-gpu": _no_gpu,
        "sweep": _sweep,
        "predict": _predict,
        "features": _predict,
    }
    records = large[name]() if name in large else _others()[name]
    kinds: Any = Union[tuple([*records, Failure])]  # noqa: UP007  of a list that is made here
    schema = TypeAdapter(kinds).json_schema(mode="serialization")
    return {"$schema": DIALECT, "title": f"paceline {name} --json", **schema}


def input_schema(name: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """JSON Schema of a command's arguments by their names, and of the settings behind them."""
    properties: dict[str, Any] = {}
    required, settings = [], Config.model_json_schema()
    definitions = settings.pop("$defs")
    for action in parser._actions:
        key = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
        if action.metavar == "key=value":
            properties["settings"] = settings
            continue
        kind = KINDS.get(action.type, "string") if action.nargs != 0 else "boolean"
        field: dict[str, Any] = {"type": kind} | ({"enum": list(action.choices)} if action.choices else {})
        if isinstance(action.default, list) or action.nargs in ("*", argparse.REMAINDER):
            field = {"type": "array", "items": field}
        elif action.nargs == "?" and action.const is not None:
            field["type"] = [kind, "boolean"]  # the option alone is true
        if action.option_strings and action.default not in (None, [], argparse.SUPPRESS):
            field["default"] = action.default
        properties[key] = field | {"description": parser._get_formatter()._expand_help(action)}
        required += [key] if action.required else []
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    more: dict[str, Any] = {"$defs": definitions} if "settings" in properties else {}
    return {"$schema": DIALECT, "title": f"paceline {name}", "description": parser.description, **schema, **more}
