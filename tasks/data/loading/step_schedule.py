"""Maps global steps to epochs and sample positions, also after a resume with a different world size."""

from dataclasses import dataclass, replace
from functools import cached_property

from paceline.tasks.data.loading.sampling import BatchPlan


@dataclass(frozen=True)
class StepSchedule:
    """The samples of each step; steps are counted over all epochs."""

    plan: BatchPlan  # plan of whole epochs
    first_step: int = 0  # first step of this group, in `epoch`, at position `first_sample` of its order
    epoch: int = 0
    first_sample: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a complete epoch."""
        return self.plan.steps_per_epoch

    @cached_property
    def _rest(self) -> BatchPlan:
        return replace(self.plan, first_sample=self.first_sample)

    def locate(self, step: int) -> tuple[int, BatchPlan, int]:
        """A step's epoch, how that is cut, and which of its cuts the step is.

        ValueError if the step was another group's.
        """
        since = step - self.first_step
        if since < 0:
            raise ValueError(f"step {step} is before {self.first_step}, where this group begins")
        if since < self._rest.steps_per_epoch:
            return self.epoch, self._rest, since
        epochs, since = divmod(since - self._rest.steps_per_epoch, self.plan.steps_per_epoch)
        return self.epoch + 1 + epochs, self.plan, since

    def position(self, step: int) -> tuple[int, int]:
        """Position after so many steps: complete epochs, and samples of the next one."""
        epoch, plan, local = self.locate(step)
        return epoch, plan.bounds(local)[0]

    def samples(self, step: int) -> int:
        """Samples seen after so many steps, over all epochs."""
        epoch, position = self.position(step)
        return epoch * self.plan.num_samples + position

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch is over when so many steps are done."""
        return self.position(step)[1] == 0

    def epoch_end(self, step: int) -> int:
        """The first step from this one on after which an epoch is over."""
        _, plan, local = self.locate(step)
        return step if self.ends_epoch(step) else step + plan.steps_per_epoch - local

    def num_steps(self, num_epochs: int) -> int:
        """Steps of a training of so many epochs, steps of earlier groups included."""
        return self.first_step + self._rest.steps_per_epoch + (num_epochs - self.epoch - 1) * self.steps_per_epoch

    def largest_part(self, rank: int) -> int:
        """Samples of a rank's largest part of any batch."""
        ends = ((plan, step) for plan in (self.plan, self._rest) for step in (0, plan.steps_per_epoch - 1))
        return max(plan.sizes(step)[rank] for plan, step in ends)

    def even_step(self, step: int) -> float:
        """Fractional step for learning-rate schedules: as if all steps had this group's batch size."""
        epoch, position = self.position(step)
        local = min(position / self.plan.global_batch_size, self.steps_per_epoch - 1)
        return epoch * self.steps_per_epoch + local

    @property
    def num_past_steps(self) -> int:
        """Steps of the current epoch that were done when this group started; all of them at the end of an epoch."""
        return self.steps_per_epoch - (self._rest.steps_per_epoch if self.first_sample else 0)
