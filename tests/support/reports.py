"""Records of a plausible run, small enough to read."""

from typing import Any

import numpy as np

from paceline.conf.config import Config
from paceline.tasks.measure.validity import judge
from paceline.tasks.records.cost import Cost
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.execution import BASELINE, Arm, Plan
from paceline.tasks.records.hardware import DeviceLimit
from paceline.tasks.records.measurement import Block, ProbeResult, Validity
from paceline.tasks.records.record import Choice
from paceline.tasks.records.training import EvaluateResult, TrainResult
from paceline.tasks.report.run_report import ReportInput
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.verdict import speedup_result

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CANDIDATE = Arm(num_devices=1, precision="bf16-mixed", compile="off", memory_format="channels_last", loading="resident")


def make_probe(
    ratio: float = 1.5, num_rounds: int = 12, noise: float = 0.01, efficiency: float | None = None, **fields: Any
) -> ProbeResult:
    rng = np.random.default_rng(3)
    candidate = fields.get("candidate", CANDIDATE)
    seconds = {"baseline": 2e-3, "candidate": 2e-3 / ratio}
    if efficiency is not None:
        seconds["single"] = seconds["candidate"] * candidate.num_devices * efficiency
    rounds = []
    for number in range(num_rounds):
        order = list(seconds) if number % 2 == 0 else list(seconds)[::-1]
        rounds.append(
            tuple(
                Block(arm=arm, seconds_per_sample=seconds[arm] * np.exp(rng.normal(0, noise)), num_steps=4)
                for arm in order
            )
        )
    return ProbeResult(
        **{
            "baseline": BASELINE,
            "candidate": CANDIDATE,
            "batch_size": 64,
            "samples_per_step": {"baseline": 64, "candidate": 64 * candidate.num_devices},
            "rounds": tuple(rounds),
            "seconds": 9.7,
            "stopped_because": "interval narrow enough",
            "validity": judge(Validity(steal_fraction=0.001, foreign_load=0.04, num_cores=2)),
        }
        | fields
    )


def make_train(probe: ProbeResult | None, **fields: Any) -> TrainResult:
    steps = np.arange(400)
    rng = np.random.default_rng(1)
    return TrainResult(
        **{
            "world_size": 2,
            "num_epochs": 8,
            "num_steps": 400,
            "seconds": 131.0,
            "samples_per_second": 866.0,
            "steps_per_epoch": 50,
            "final_loss": 0.41,
            "checkpoint": "last.ckpt",
            "weights": "last.pt",
            "resumed_from": None,
            "losses": tuple(2.2 * np.exp(-steps / 150) + 0.3 + rng.normal(0, 0.08, 400)),
            "first_step": 0,
            "validation_scores": (0.49, 0.59, 0.62, 0.69, 0.71, 0.735, 0.75, 0.762),
            "time_budget": {"training_steps": 110.0},
            "wall_seconds": 150.0,
            "data_wait_fraction": 0.013,
            "predictions": ("rank0.npz",),
            "prediction_samples_per_second": 4100.0,
            "probe": probe,
            "hosts": ("node1",),
            "devices": ("cpu:0", "cpu:1"),
        }
        | fields
    )


def limited(of_limit: float = 0.71, of_bandwidth: float | None = 0.2, device_name: str = "Xeon") -> dict[str, Any]:
    """Fields of a training whose step reached these shares with `make_probe()`: 750 samples/s on one device."""
    training_flops, rate = 3e9, 750.0
    return {
        "world_size": 1,
        "cost": Cost(
            forward_flops=1e9, training_flops=training_flops, num_parameters=10, num_trained=10, image_bytes=3072
        ),
        "bytes_per_sample": None if of_bandwidth is None else of_bandwidth * 1e10 / rate,
        "limit": DeviceLimit(
            device_name=device_name,
            driver=None,
            torch="2.13.0",
            num_threads=2,
            flops_per_second={"32-true": 1e12, "bf16-mixed": training_flops * rate / of_limit},
            bytes_per_second=1e10,
            seconds=2.0,
        ),
    }


def make_evaluate(class_names: tuple[str, ...] = CLASSES) -> EvaluateResult:
    num_classes = len(class_names)
    rng = np.random.default_rng(2)
    confusion = rng.poisson(3, (num_classes, num_classes)) + np.diag(rng.integers(60, 95, num_classes))
    recall = np.diag(confusion) / confusion.sum(axis=1)
    return EvaluateResult(
        num_samples=int(confusion.sum()),
        accuracy=float(np.trace(confusion) / confusion.sum()),
        top_k={"2": 0.91, "3": 0.95, "5": 0.99},
        per_class_accuracy={name: float(value) for name, value in zip(class_names, recall, strict=True)},
        confusion=tuple(tuple(int(count) for count in row) for row in confusion),
        angle_rmse_degrees=None,
        samples_per_second=4100.0,
        seconds=0.1,
    )


def make_report(probe: ProbeResult | None, class_names: tuple[str, ...] = CLASSES) -> ReportInput:
    train, evaluate = make_train(probe), make_evaluate(class_names)
    speedup = speedup_result(probe, train, num_cores=2) if probe else SpeedupResult()
    prepared = PreparedSet(
        path="prepared/abc",
        key="abc",
        fingerprint="1f0c9a2b",
        image_shape=(32, 32, 3),
        class_names=class_names,
        num_train=45_000,
        num_validation=5_000,
        num_test=10_000,
        num_rejected=3,
        ignored={".txt": 2},
        class_counts={"test": (1000,) * len(class_names)},
        mean=(0.5, 0.5, 0.5),
        std=(0.2, 0.2, 0.2),
        num_bytes=184_000_000,
        reused=True,
        seconds=0.4,
    )
    plan = Plan(
        accelerator="cpu",
        device_name="AMD EPYC 9R14 (2 cores)",
        world_size=2,
        num_threads=1,
        precision="bf16-mixed",
        compile="off",
        memory_format="channels_last",
        loading="resident",
        strategy="ddp",
        reasons={
            "precision": Choice(value="bf16-mixed", reason="the CPU multiplies bfloat16 in hardware (AVX512-BF16)"),
            "compile": Choice(value="off", reason="a first compile takes 14 to 26 s, more than it would save here"),
            "loading": Choice(value="resident", reason="the set (184 MB) fits into memory many times"),
        },
    )
    summary = {
        "run_id": "6f1d2c0a9b8e4d7f8a5b3c2d1e0f9a8b",
        "experiment": "paceline",
        "tracking_uri": "http://user:secret@tracking.example:5000",
        "workload": "9c0ffee1",
        "dataset": {
            "fingerprint": "1f0c9a2b",
            "num_train": 45_000,
            "num_validation": 5_000,
            "num_test": 10_000,
            "num_rejected": 3,
            "reused": True,
            "seconds": 0.4,
        },
        "train": train.model_dump(include={"world_size", "num_epochs", "num_steps", "seconds", "samples_per_second"}),
        "evaluate": evaluate.model_dump(),
        "speedup": speedup.model_dump(),
        "time_budget": {
            "training_steps": 110.2,
            "validation": 8.1,
            "probe": 9.7,
            "imports": 7.9,
            "prepare_data": 0.4,
            "checkpoints": 1.2,
            "evaluation": 2.3,
            "waiting_for_data": 1.4,
            "start_processes": 2.2,
            "other": 0.02,
            "tracking": 0.01,
        },
        "seconds": 143.4,
    }
    return ReportInput(
        summary=summary,
        config=Config(name="cifar10"),
        plan=plan,
        prepared=prepared,
        train=train,
        speedup=speedup,
        evaluate=evaluate,
        environment={"python": "3.11.7", "torch": "2.13.0", "commit": "abc123"},
    )


def make_sample_report() -> ReportInput:
    """Report of a run on two devices."""
    two = CANDIDATE.model_copy(update={"num_devices": 2})
    return make_report(make_probe(candidate=two, ratio=2.9, efficiency=0.95))
