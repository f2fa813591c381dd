"""Replacement of Lightning's loop over an epoch's batches, which runs `TrainStep` and skips unused hooks.

Lightning's own loop calls every callback, the module, the strategy, the precision plugin and three schedulers in each
step, which costs a small network a fifth of its time (infra/decisions/0003). This loop updates the same counters, so
that Lightning's checkpoints, epochs and resumes work.
"""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException

from paceline.conf.execution import CAPTURED
from paceline.tasks.data.loading.augmentation import resize_for_epoch
from paceline.tasks.model.optimization import prepare_optimizer_state
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.training import CompileStats
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.train.step.cuda_graph import CapturedStep, make_step
from paceline.tasks.train.step.learner import Learner
from paceline.tasks.train.step.precision import make_scaler
from paceline.tasks.train.step.train_step import TrainStep, raise_if_out_of_memory


class StepLoop(_TrainingEpochLoop):
    """The loop over the batches of an epoch, to replace that of a trainer that has not started.

    `draws` is the seed of a network that draws random numbers, as for dropout; each step adds its number; None for
    a network that draws none. The stopwatch gets `forward`, `backward`, `optimizer`, or `graph`, and `loop`.
    """

    def __init__(
        self, trainer: Trainer, plan: Plan, stopwatch: Stopwatch, draws: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(trainer)
        self._plan, self._stopwatch, self._draws = plan, stopwatch, draws
        self._step: TrainStep | CapturedStep | None = None
        self._passes: TrainStep | None = None  # the eager step, also inside a captured one

    def capture_stats(self) -> CompileStats | None:
        """Statistics of a captured step; None for others."""
        return self._step.stats() if isinstance(self._step, CapturedStep) else None

    @property
    def num_warm_up_steps(self) -> int:
        """Number of steps before a graph and of those that were captured."""
        return self._step.num_warm_up_steps if isinstance(self._step, CapturedStep) else 0

    @property
    def num_passes(self) -> int:
        """Number of passes through the network in the steps of this process."""
        return self._passes.num_passes if self._passes else 0

    @property
    def passes_per_step(self) -> float:
        """Mean number of passes per step."""
        return self._passes.num_passes / self._passes.num_steps if self._passes and self._passes.num_steps else 1.0

    def advance(self, data_fetcher: Any) -> None:
        try:
            self._advance(data_fetcher)
        except RuntimeError as error:  # of the loader or the first update; passes say how many samples they have
            learner, device = self.trainer.lightning_module, self.trainer.strategy.root_device
            assert isinstance(learner, Learner)
            num_samples = self._plan.micro_batch or learner.course.largest_part(self.trainer.global_rank)
            raise_if_out_of_memory(error, "a step in passes", num_samples, device)
            raise

    def _advance(self, data_fetcher: Any) -> None:
        trainer, progress = self.trainer, self.batch_progress
        batch, _, _ = next(data_fetcher)
        learner, step = trainer.lightning_module, self._step or self._make_step()
        assert isinstance(learner, Learner)
        progress.is_last_batch = data_fetcher.done
        progress.increment_ready()
        progress.increment_started()
        learner.set_learning_rate(trainer.optimizers[0])
        if learner.recipe.progressive_size is not None:
            batch = resize_for_epoch(batch, learner.recipe, learner.course.position(learner.global_step)[0])
        if self._draws is not None:  # a resumed training draws the same numbers
            seed = np.random.SeedSequence((*self._draws, learner.global_step)).generate_state(1, np.uint64)
            torch.manual_seed(int(seed[0] >> 1))
        updates = self.automatic_optimization.optim_progress.optimizer.step  # the trainer's global step
        updates.increment_ready()
        learner.pending.append(step(batch))
        updates.increment_completed()
        progress.increment_processed()
        for callback in trainer.callbacks:
            callback.on_train_batch_end(trainer, learner, None, batch, self.batch_idx)
        progress.increment_completed()

    def on_advance_end(self, data_fetcher: Any) -> None:
        self._batches_that_stepped += 1
        if self.trainer.received_sigterm and not self._is_training_done:
            raise SIGTERMException

    def _make_step(self) -> TrainStep | CapturedStep:
        trainer, plan = self.trainer, self._plan
        learner, model, device = trainer.lightning_module, trainer.strategy.model, trainer.strategy.root_device
        assert isinstance(learner, Learner)
        assert model is not None
        prepare_optimizer_state(trainer.optimizers[0], learner.network, is_captured=plan.compile in CAPTURED)
        # The plugin's own where there is one: its state is in the checkpoint.
        scaler = getattr(trainer.precision_plugin, "scaler", None) or make_scaler(plan.precision, device)
        enter = self._stopwatch.switch
        self._passes = TrainStep(model, trainer.optimizers[0], scaler, plan, device, enter, learner.average)
        self._step = make_step(self._passes, plan, device, enter)
        return self._step
