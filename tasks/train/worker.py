"""One rank: `python -m tasks.train.worker spec.json` joins the group, probes, trains, predicts, and writes result.json.

The composition root of a rank's process: the only module of a stage that brings other stages' parts together. It knows
nothing of Dask, Prefect or how it was started, so any engineer can replay it by hand.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

STARTED_AT = float(os.environ.get("PACELINE_SPAWNED_AT", time.monotonic()))

import numpy as np  # noqa: E402  the clock above counts these imports
import torch  # noqa: E402
from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from torch import nn  # noqa: E402

from tasks.data.loading.batch import Batch  # noqa: E402
from tasks.data.loading.evaluation import evaluation_batches  # noqa: E402
from tasks.data.loading.loader import TrainLoader, make_loader  # noqa: E402
from tasks.data.loading.order import BatchPlan  # noqa: E402
from tasks.data.split import Split, open_split  # noqa: E402
from tasks.errors import RunError  # noqa: E402
from tasks.fingerprint import code_fingerprint  # noqa: E402
from tasks.model.infer import Int64s  # noqa: E402
from tasks.model.module import STATE_KEY, Learner  # noqa: E402
from tasks.model.networks import build_network  # noqa: E402
from tasks.records import Arm, ProbeResult, RankSpec, TrainResult  # noqa: E402
from tasks.speedup.probe import ArmRunner, run_probe  # noqa: E402
from tasks.track.metrics import MetricsWriter, system_metrics  # noqa: E402
from tasks.train import group  # noqa: E402
from tasks.train.appraise import count, predict, save_predictions  # noqa: E402
from tasks.train.callbacks import (  # noqa: E402
    BudgetCallback,
    CheckpointCallback,
    ProgressCallback,
    StepLoader,
    ValidationCallback,
    write_atomically,
)
from tasks.train.checkpoint import AtomicCheckpointIO, load  # noqa: E402
from tasks.train.precision import forward_context, prepare_network  # noqa: E402
from tasks.train.step import DDP_SETTINGS, BareStep, StepInputs  # noqa: E402
from tasks.train.stopwatch import Stopwatch  # noqa: E402
from tasks.train.supervise import running_ranks  # noqa: E402

PR_SET_PDEATHSIG = 1
EVALUATION_PIXELS = 512 * 32 * 32  # of a batch's images, so that large ones need no more memory than small ones
BASELINE = Arm(num_devices=1, precision="32-true", compile="off", memory_format="contiguous", loading="foreground")


class Rank:
    """One rank's part of a training.

    Args:
        spec: its place and its work.
        stopwatch: of the process, running.
    """

    def __init__(self, spec: RankSpec, stopwatch: Stopwatch) -> None:
        if spec.code_fingerprint != code_fingerprint():
            raise RunError(
                f"this rank's code is {code_fingerprint()}, the coordinator's {spec.code_fingerprint}; "
                "install the same version on every host"
            )
        self.spec = spec
        self.config = spec.config
        self.stopwatch = stopwatch
        self.directory = Path(spec.directory)
        self.writes = spec.rank == 0
        torch.set_num_threads(spec.plan.num_threads)
        self.device = group.pick_device(spec)
        group.join(spec, self.device)
        self.train_split = open_split(spec.prepared, "train")
        self.batches = self._plan(spec.world_size)
        self._check_group()
        torch.manual_seed(self.config.seed)
        self.network = build_network(
            self.config.model,
            spec.prepared.image_shape,
            len(spec.prepared.class_names),
            len(spec.prepared.target_names),
        )

    def run(self) -> TrainResult:
        """Probe, train, predict the test split."""
        spec = self.spec
        first_step = self._first_step()
        arm = self._candidate()
        loader = self._loader(arm, self.batches, spec.rank)
        with ExitStack() as stack:
            stack.callback(loader.close)
            with self.stopwatch.during("probe"):
                probe = self._probe(arm, loader)
            writer = stack.enter_context(self._metrics()) if self.writes else None
            learner, budget, checkpoints = self._fit(loader, first_step, writer)
            learner.network.to(self.device)  # Lightning has moved it to the CPU, where NCCL cannot average
            group.average_buffers(learner.network)
            with self.stopwatch.during("prediction"):
                predictions_path, rate = self._predict(learner.network)
                weights = self._save_weights(learner.network)
            self.stopwatch.switch("teardown")
        facts = self._result(learner, budget, checkpoints, first_step) | {
            "probe": probe,
            "predictions": (predictions_path,),
            "prediction_samples_per_second": rate,
            "weights": weights,
        }
        return TrainResult.model_validate(facts)

    # Setting up

    def _plan(self, world_size: int) -> BatchPlan:
        recipe = self.config.recipe
        size = recipe.batch_size * (world_size if recipe.batch_scaling == "weak" else 1)
        return BatchPlan(self.train_split.num_samples, size, world_size)

    def _check_group(self) -> None:
        place = f"{socket.gethostname()}/{self.device}" if self.device.type == "cuda" else f"rank {self.spec.rank}"
        facts = {
            "data": self.spec.prepared.fingerprint,
            "num_steps": self.batches.steps_per_epoch,
            "code": self.spec.code_fingerprint,
            "device": place,
        }
        group.check_agreement(self.spec, facts, same=("data", "num_steps", "code"), unique=("device",))

    def _first_step(self) -> int:
        if self.spec.resume_from is None:
            return 0
        state = load(Path(self.spec.resume_from))[STATE_KEY]
        if state["steps_per_epoch"] != self.batches.steps_per_epoch:
            raise RunError(
                f"{self.spec.resume_from} was made with {state['steps_per_epoch']} steps per epoch, and this group "
                f"takes {self.batches.steps_per_epoch}; resume with as many devices as before"
            )
        return int(state["step"])

    def _candidate(self) -> Arm:
        plan = self.spec.plan
        return Arm(
            num_devices=plan.world_size,
            precision=plan.precision,
            compile=plan.compile,
            memory_format=plan.memory_format,
            loading=plan.loading,
        )

    def _loader(self, arm: Arm, plan: BatchPlan, rank: int) -> TrainLoader:
        recipe = self.config.recipe
        return make_loader(
            self.train_split,
            self.spec.prepared.mean,
            self.spec.prepared.std,
            loading=arm.loading,
            plan=plan,
            rank=rank,
            seed=self.config.seed,
            augment=recipe.augment,
            shift_pixels=recipe.shift_pixels,
            device=self.device,
            channels_last=arm.memory_format == "channels_last",
        )

    # Measuring

    def _probe(self, arm: Arm, loader: TrainLoader) -> ProbeResult | None:
        if self.config.speedup.baseline == "none":
            return None
        inputs = StepInputs(self.network, self.config.recipe, self.config.recipe.learning_rate, self.device)
        arms = {"baseline": BASELINE, "candidate": arm}
        if arm.num_devices > 1:
            arms["single"] = arm.model_copy(update={"num_devices": 1})
        runners = {}
        with ExitStack() as stack:
            for role, other in arms.items():
                plan = self.batches if role == "candidate" else self._plan(1)
                # Without a full batch there is one batch, of all samples.
                samples = plan.global_batch_size if plan.num_full_steps else plan.num_samples
                run = _no_part
                if role == "candidate" or self.writes:
                    own = loader if role == "candidate" else stack.enter_context(closing(self._loader(other, plan, 0)))
                    run = stack.enter_context(closing(BareStep(inputs, other, own, max(1, plan.num_full_steps)))).run
                runners[role] = ArmRunner(other, run, samples)
            return run_probe(runners, self.config.speedup, group.agreed, self._own_processes())  # type: ignore[arg-type]

    def _own_processes(self) -> list[int]:
        """Processes of this run on this host, whose load is not foreign: ranks, their Dask worker, the flow."""
        host, pid = self.spec.coordinator
        flow = [pid] if host == socket.gethostname() else []
        return [os.getppid(), *running_ranks(self.spec.run_id), *flow]

    # Training

    def _fit(
        self, loader: TrainLoader, first_step: int, writer: MetricsWriter | None
    ) -> tuple[Learner, BudgetCallback, CheckpointCallback]:
        spec, watch = self.spec, self.stopwatch
        watch.switch("setup")
        learner = Learner(self._prepared_network(), self.config.recipe, self.config.peak_learning_rate, len(loader))
        log = writer.log if writer else None
        budget = BudgetCallback(watch)
        progress = ProgressCallback(
            watch, log, self.directory / "progress.json" if self.writes else None, self.train_split.num_samples
        )
        checkpoints = CheckpointCallback(
            watch, Path(spec.checkpoint_directory), self.config.execution.checkpoint_steps, progress
        )
        validation = ValidationCallback(watch, lambda: self._count(learner.network), log)
        trainer = self._trainer([budget, progress, validation, checkpoints])
        trainer.fit(learner, StepLoader(loader, watch, first_step), ckpt_path=spec.resume_from)
        return learner, budget, checkpoints

    def _prepared_network(self) -> nn.Module:
        plan = self.spec.plan
        # Lightning's own plugin converts to float64; here only the layout is set.
        network = prepare_network(self.network, "32-true", plan.memory_format == "channels_last", self.device)
        if plan.compile == "step":
            network.compile()  # the inner module: self.log in a compiled LightningModule crashes
        return network

    def _trainer(self, callbacks: list[Any]) -> Trainer:
        spec, plan = self.spec, self.spec.plan
        plugins: list[Any] = [AtomicCheckpointIO()]
        strategy: Any = "auto"
        if plan.strategy == "ddp":
            plugins.append(group.RankEnvironment(spec))
            strategy = DDPStrategy(**DDP_SETTINGS)  # type: ignore[arg-type]
        trainer = Trainer(
            accelerator=plan.accelerator,
            devices=self.config.execution.num_devices,
            num_nodes=self.config.execution.num_nodes,
            strategy=strategy,
            precision=plan.precision,
            plugins=plugins,
            max_epochs=self.config.recipe.num_epochs,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            default_root_dir=str(self.directory),
        )
        # Since 2.5.2 Lightning broadcasts a flag and reads it back in every step (Lightning#21487): a wait for the
        # device each time. The coordinator ends all ranks together, so the flag has nothing to tell.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        return trainer

    @contextmanager
    def _metrics(self) -> Iterator[MetricsWriter]:
        spec = self.spec
        resumed = spec.resume_from is not None or not self.directory.parent.name.endswith("-0")
        writer = MetricsWriter(spec.tracking_uri, spec.run_id, resumed)
        try:
            with system_metrics(spec.tracking_uri, spec.run_id, resumed):
                yield writer
        finally:
            writer.close()

    # Evaluating

    def _evaluation(self, split: Split) -> Iterator[tuple[Int64s, Batch]]:
        prepared, plan = self.spec.prepared, self.spec.plan
        height, width, _ = prepared.image_shape
        return evaluation_batches(
            split,
            prepared.mean,
            prepared.std,
            min(512, max(1, EVALUATION_PIXELS // (height * width))),
            self.spec.rank,
            self.spec.world_size,
            self.device,
            plan.memory_format == "channels_last",
        )

    def _count(self, network: nn.Module) -> torch.Tensor:
        """[correct, samples, summed cross-entropy] of this rank's share of the validation split."""
        if not self.spec.prepared.num_validation:
            return torch.zeros(3, dtype=torch.float64, device=self.device)
        group.average_buffers(network)
        batches = self._evaluation(open_split(self.spec.prepared, "validation"))
        return count(network, batches, forward_context(self.spec.plan.precision, self.device), self.device)

    def _predict(self, network: nn.Module) -> tuple[str, float]:
        """Predict this rank's share of the test split; the file's path and the group's samples per second."""
        split = open_split(self.spec.prepared, "test")
        context = forward_context(self.spec.plan.precision, self.device)
        started = time.perf_counter()
        arrays = predict(network, self._evaluation(split), context)
        seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=self.device)
        path = self.directory / "predictions.npz"
        save_predictions(path, arrays, len(self.spec.prepared.class_names), len(self.spec.prepared.target_names))
        return str(path), split.num_samples / float(group.reduced(seconds, "max").item())

    def _save_weights(self, network: nn.Module) -> str | None:
        if not self.writes:
            return None
        path = self.directory / "weights.pt"
        torch.save({name: tensor.cpu() for name, tensor in network.state_dict().items()}, path)
        return str(path)

    def _result(
        self, learner: Learner, budget: BudgetCallback, checkpoints: CheckpointCallback, first_step: int
    ) -> dict[str, Any]:
        plan, items = self.spec.plan, self.stopwatch.budget()
        steps = sum(items.get(name, 0.0) for name in ("forward", "backward", "optimizer", "loop"))
        waiting = items.get("data_wait", 0.0)
        num_steps = len(learner.losses)
        samples = (num_steps - first_step) * self.train_split.num_samples / learner.steps_per_epoch
        return {
            "world_size": self.spec.world_size,
            "num_epochs": self.config.recipe.num_epochs,
            "num_steps": num_steps,
            "seconds": budget.fit_seconds,
            "samples_per_second": samples / (steps + waiting) if samples else None,
            "final_loss": float(np.mean(learner.losses[-learner.steps_per_epoch :])),
            "checkpoint": str(checkpoints.last or self.spec.resume_from),
            "resumed_from": self.spec.resume_from,
            "losses": learner.losses,
            "first_step": first_step,
            "validation_accuracy": learner.validation_accuracy,
            "time_budget": items,
            "wall_seconds": sum(items.values()),
            "data_wait_fraction": waiting / (steps + waiting) if samples else None,
            "hosts": (socket.gethostname(),),
            "devices": (" ".join([plan.device_name, *self.spec.devices[self.spec.local_rank :][:1]]),),
        }


def _no_part(num_steps: int) -> list[float]:
    """The part of a rank that sits an arm out."""
    return []


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the worker that supervises it dies."""
    if "PACELINE_SPAWNED_AT" not in os.environ:
        return  # replayed by hand
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(1)  # it died before the request


def main(spec_path: str) -> int:
    """Run the rank of a spec; 0 when it has written its result."""
    faulthandler.enable()  # a crash in a library's native code leaves the Python stack in the log
    die_with_parent()
    stopwatch = Stopwatch("startup", STARTED_AT)
    spec = RankSpec.model_validate_json(Path(spec_path).read_text(encoding="utf-8"))
    directory = Path(spec.directory)
    directory.mkdir(parents=True, exist_ok=True)
    for engine in ("lightning.pytorch", "lightning.fabric", "mlflow"):
        logging.getLogger(engine).setLevel(logging.WARNING)  # their greetings and advertisements
    warnings.filterwarnings("ignore", module="lightning")  # advice on DataLoader workers that we do not use
    try:
        result = Rank(spec, stopwatch).run()
    except BaseException as error:  # noqa: BLE001  whatever ends a rank is reported, with its traceback
        facts = {
            "rank": spec.rank,
            "message": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
            "time": time.time(),
        }
        write_atomically(directory / "error.json", json.dumps(facts))
        traceback.print_exc()
        return 1
    write_atomically(directory / "result.json", result.model_dump_json())
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    # Leave at once: the interpreter's own exit takes half a second with torch loaded, and after an error
    # a group's destructor may wait for peers that are gone.
    os._exit(status)
