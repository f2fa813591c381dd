"""The settings of a training of the user's own Lightning code, in the form that LightningCLI reads."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from paceline.conf.section import Section, Text

SECTIONS = ("model", "data", "trainer", "optimizer", "lr_scheduler", "seed_everything")
"""Of LightningCLI."""
FIXED: dict[str, dict[str, object]] = {
    "execution": {
        **{"memory_format": "contiguous", "loading": "foreground", "micro_batch": "off"},
        **{"activation_checkpointing": "off", "gradient_compression": "off", "worker_load": "equal"},
    },
    "speedup": {"starts": 0, "competent_loop": False},
    "cluster": {"min_workers": None},
    "track": {"min_accuracy": None},
}
"""The only values of these settings with which own Lightning code runs so far."""
EXECUTION = FIXED["execution"] | {"precision": "32-true", "compile": "off"}
"""The execution of own Lightning code where nothing else is set: what Lightning does by itself."""


LENGTH_HINT = "trainer.max_time=null trainer.max_steps=1000"
"""For a training whose length is not known."""
NO_AVERAGES = (
    "callback {} cannot be used with execution.strategy=fsdp: it averages whole weights, and each rank has a part of "
    "them; use execution.strategy=ddp, or remove the callback"
)


def ends_by_time(trainer: Mapping[str, Any]) -> bool:
    """Whether a time limit in the settings of a trainer may end its training."""
    return trainer.get("max_time") is not None or "Timer" in str(trainer.get("callbacks"))


class Lightning(Section):
    """Your own LightningModule and LightningDataModule; `paceline run` reads them from a file of LightningCLI."""

    settings: dict[str, Any] = Field(default_factory=dict)
    """Configuration as LightningCLI reads it: model, data, trainer, optimizer, lr_scheduler, seed_everything."""
    given: dict[str, Any] = Field(default_factory=dict)
    """The part of them that your file and the command line name; nights start from it. Paceline sets it."""
    code: Text | None = None
    """Directory of your code, given by `--code`; null where all classes are in installed packages."""
    ckpt_path: Text | None = None
    """Checkpoint of a plain script to start from, in LightningCLI's word; null to start from the beginning."""
    ckpt_sha256: Text | None = None
    """Digest of that checkpoint. Paceline sets it."""
    prepares_data: bool = False
    """Whether the data, or else the model, define `prepare_data`. Paceline sets it."""
    has_partitions: bool = False
    """Whether the data define `partitions` and `prepare_partition`. Paceline sets it."""
    averages: Text | None = None
    """Class of a callback that averages weights. Paceline sets it."""
    packages: tuple[Text, ...] = ()
    """Packages and directory of the classes, with versions and digests of their files. Paceline sets them."""


class Objective(Section):
    """A metric that your module logs, by which a study or a sweep compares trainings."""

    name: Text
    """Its name in `self.log`."""
    goal: Literal["minimize", "maximize"]
    """Whether smaller or larger is better."""

    @property
    def sign(self) -> int:
        """Factor that makes a larger value the better one."""
        return 1 if self.goal == "maximize" else -1
