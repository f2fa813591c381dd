"""The one LightningModule: it ties a network, its objective and its schedule together."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from paceline.conf.recipe import Recipe
from paceline.tasks.data.loading.sampling import StepSchedule
from paceline.tasks.model.batch import Batch
from paceline.tasks.model.muon import RATE_FACTOR
from paceline.tasks.model.objectives import Task
from paceline.tasks.model.optimization import WeightAverage, batch_loss, build_optimizer, learning_rate_factor

STATE_KEY = "paceline"


class Learner(LightningModule):
    """Trains `network` by `recipe`, with the loader's schedule `course`; the peak rate is that after batch scaling."""

    def __init__(
        self, network: nn.Module, task: Task, recipe: Recipe, peak_learning_rate: float, course: StepSchedule
    ) -> None:
        super().__init__()
        self.network, self.task, self.course = network, task, course
        self.recipe, self.peak_learning_rate = recipe, peak_learning_rate
        self.losses: list[float] = []
        """Loss of every step whose value has been read from the device; filled by the progress callback."""
        self.validation_scores: list[float] = []  # of the task, after each epoch
        self.epoch_ends: list[int] = []  # steps done at the end of each epoch that is over
        self.pending: list[torch.Tensor] = []
        """Losses still on the device: reading each would make the host wait in every step."""
        self._average: WeightAverage | None = None
        self._average_sums: dict[str, torch.Tensor] | None = None

    @property
    def average(self) -> WeightAverage | None:
        """Average of the weights, from the checkpoint on after a resume; None where the recipe has none."""
        if self._average is None and self.recipe.ema is not None:
            self._average = WeightAverage(self.network, self.recipe.ema, self._average_sums)
            self._average_sums = None
        return self._average

    def set_learning_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the rate of the step that comes."""
        # Not by a scheduler of torch's: its state would bring a former group's rate along into a resume.
        step = self.course.even_step(self.global_step)
        rate = self.peak_learning_rate * learning_rate_factor(self.recipe, step, self.course.plan.steps_per_epoch)
        for group in optimizer.param_groups:
            group_rate = rate * group.get(RATE_FACTOR, 1.0)
            if isinstance(group["lr"], torch.Tensor):  # in a CUDA graph, which reads it there
                group["lr"].fill_(group_rate)
            else:
                group["lr"] = group_rate

    def forward(self, batch: Batch) -> torch.Tensor:
        """Loss of one batch of this rank."""
        return batch_loss(self.network, batch, self.recipe, self.task)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        # What Lightning asks a module to have; the loop that trains calls `forward`, by way of the strategy's wrap.
        return self(batch)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return build_optimizer(self.network, self.recipe, self.peak_learning_rate)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what is done, and the curves, so that a resumed run reports the whole course. Plain types only."""
        epoch, first_sample = self.course.position(self.global_step)
        checkpoint[STATE_KEY] = {
            "step": int(self.global_step),
            "epoch": epoch,
            "first_sample": first_sample,
            "epoch_ends": list(self.epoch_ends),
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "validation_scores": torch.tensor(self.validation_scores, dtype=torch.float64),
        }
        if self.average is not None:
            checkpoint[STATE_KEY]["ema"] = self.average.sums

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the curves, and set Lightning's position in the epoch in batches of this group."""
        state = checkpoint[STATE_KEY]
        self.epoch_ends = list(state["epoch_ends"])
        self.losses = state["losses"].tolist()
        self._average_sums = state.get("ema")
        self.validation_scores = state.get("validation_scores", state.get("validation_accuracy")).tolist()
        # Its loop ends an epoch by this count, which the group before had in batches of its own size.
        counts = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
        shift = self.course.num_past_steps - counts["ready"]
        counts.update({name: count + shift for name, count in counts.items()})
