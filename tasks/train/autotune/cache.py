"""Cache of autotuning results for later trainings of the same work on the same hardware, under PACELINE_HOME."""

from importlib.metadata import version
from pathlib import Path

from paceline.conf.config import Config
from paceline.tasks.files import MeasurementCache
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.measurement import AutotuneResult

COST_FREE_SETTINGS = {
    *("num_epochs", "learning_rate", "momentum", "weight_decay"),
    *("drop_epochs", "drop_factor", "warmup_epochs"),
}
"""Settings of a recipe that do not change what a step costs."""


class AutotuneCache(MeasurementCache[AutotuneResult]):
    """The autotuning result for one kind of work, on one kind of hardware, with these versions."""

    def __init__(self, home: Path, config: Config, hardware: Hardware, prepared: PreparedSet | None = None) -> None:
        """`prepared` is None for own Lightning code, whose settings name its data."""
        facts = {
            **(_preset_facts(config, prepared) if prepared is not None else {"lightning": config.lightning.settings}),
            "execution": config.execution.model_dump(mode="json", exclude={"checkpoint_steps", "max_restarts"}),
            "hardware": hardware.model_dump(
                mode="json", exclude={"host": True, "gpus": {"__all__": {"uuid", "free_bytes", "board"}}}
            ),
            "versions": {name: version(name) for name in ("torch", "lightning", "numpy")},
            "code": [code_fingerprint(), *(each.identity for each in config.packages), *config.lightning.packages],
        }
        super().__init__(home, facts, AutotuneResult)

    def keep(self, result: AutotuneResult | None, *, even_contaminated: bool = False) -> None:
        """Save a new result; a contaminated one only with `even_contaminated`."""
        if result is None or (result.validity.contaminated and not even_contaminated) or result == self.find():
            return
        super().keep(result)


def _preset_facts(config: Config, prepared: PreparedSet) -> dict[str, object]:
    return {
        "model": config.model.model_dump(mode="json", exclude={"pretrained"}),
        "recipe": config.recipe.model_dump(mode="json", exclude=COST_FREE_SETTINGS),
        "image_shape": prepared.image_shape,
        "num_classes": len(prepared.class_names),
        "num_targets": len(prepared.target_names),
        "num_train": prepared.num_train,
    }
