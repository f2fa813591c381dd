"""Predictions of the user's module: Lightning's Trainer on its `predict_step`, in one process."""

import io
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from paceline.conf.hints import fault_and_hint
from paceline.tasks.errors import InputError, one_line
from paceline.tasks.model.threads import use_threads
from paceline.tasks.model_bundle import read_model
from paceline.tasks.records.prediction import ModulePredicted, ModulePrediction
from paceline.tasks.train.lightning import code
from paceline.tasks.train.lightning.cli import ModuleCLI
from paceline.tasks.train.lightning.feed import FedDevice
from paceline.tasks.train.lightning.rows import SHAPES, PartWriter
from paceline.tasks.train.lightning.step_parts import num_samples
from paceline.tasks.train.step.precision import lightning_precision


class _Device(FedDevice):
    """One device; a checkpoint that does not fit the module is wrong input.

    `file` is that of the checkpoint.
    """

    def __init__(self, *args: Any, file: str | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._file = file

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        try:
            super().load_model_state_dict(checkpoint, strict)
        except RuntimeError as error:
            fault = f"ckpt_path={self._file} does not fit the module ({one_line(error)[:300]})"
            hint = "remove the settings of model, or name a checkpoint of this model: ckpt_path=checkpoints/last.ckpt"
            raise InputError(fault, hint=hint, setting="ckpt_path") from error


class WriteRows(Callback):
    """Writes the result of each batch, and loads the weights of a model, if it is not a checkpoint, before."""

    def __init__(self, writer: PartWriter, weights: bytes | None) -> None:
        self._writer, self._weights = writer, weights
        self.started = 0.0

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if math.inf in trainer.num_predict_batches:
            raise InputError(
                "the loader of predict_dataloader has no length, so that it may never end",
                hint="give a number of batches as trainer.limit_predict_batches",
                setting="trainer.limit_predict_batches",
            )
        if self._weights is not None:
            state = torch.load(io.BytesIO(self._weights), map_location="cpu", weights_only=True)
            try:
                pl_module.load_state_dict(state)
            except RuntimeError as error:
                fault = f"the weights do not fit the module ({one_line(error)[:300]})"
                raise InputError(fault, hint="remove the settings of model") from error
        self.started = time.perf_counter()

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        more = {"dataloader": dataloader_idx} if len(trainer.num_predict_batches) > 1 else {}
        self._writer.add(outputs, num_samples(batch), **more)


def predict_module(job: ModulePrediction) -> ModulePredicted:
    """Predict all batches, and write their rows.

    Raises InputError: a batch gave other columns than those before, which are written. What is wrong before is part of
    the answer.
    """
    directory = Path(job.code) if job.code else None
    code.import_from(directory)
    code.require(job.packages, job.settings, directory)
    use_threads(job.num_threads)
    weights = None
    if job.model_directory is not None and job.model_digest is not None:
        _, weights = read_model(Path(job.model_directory), job.model_digest)
    writer = PartWriter(Path(job.out))
    rows = WriteRows(writer, weights)
    device = torch.device("cuda", 0) if job.gpu else torch.device("cpu")
    options = {
        **{"accelerator": "gpu" if job.gpu else "cpu", "devices": 1, "num_nodes": 1},
        "strategy": _Device(lambda loader: loader, device=device, file=job.checkpoint),
        "precision": lightning_precision(job.precision),
        "callbacks": [rows],
        "default_root_dir": job.directory,
        **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False},
        "enable_model_summary": False,
    }
    try:
        cli = ModuleCLI(job.settings, options, job.partitions)
        cli.trainer.predict(
            cli.model,
            datamodule=cli.datamodule,
            return_predictions=False,
            ckpt_path=job.checkpoint,
            weights_only=True,
        )
        writer.write()
        if writer.num_batches and not writer.num_rows:
            batches = f"{writer.num_batches} batch{'es' if writer.num_batches > 1 else ''}"
            raise InputError(f"predict_step returned no row in {batches}", hint=SHAPES)
        if not writer.num_rows:
            raise InputError("predict_dataloader gives no sample", hint="check the data of your predict_dataloader")
    except InputError as error:
        if writer.num_parts:
            raise
        return ModulePredicted(num_samples=0, num_batches=0, seconds=0, columns={}, refused=fault_and_hint(error))
    return ModulePredicted(
        num_samples=writer.num_rows,
        num_batches=writer.num_batches,
        seconds=time.perf_counter() - rows.started,
        columns={field.name: str(field.type) for field in writer.schema},
    )
