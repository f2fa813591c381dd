"""What the user's own ModelCheckpoint callbacks keep, next to the checkpoints from which a training resumes."""

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from paceline.tasks.records.training import BestModel


def best_models(trainer: Trainer) -> tuple[BestModel, ...]:
    """The best model that each callback has kept, by the metric that it monitors, or else the newest one."""
    return tuple(
        BestModel(
            path=each.best_model_path,
            monitor=each.monitor,
            score=None if each.best_model_score is None else float(each.best_model_score),
        )
        for each in _callbacks(trainer)
        if each.best_model_path
    )


def forget_removed(trainer: Trainer) -> None:
    """After a resume, forget the files that were removed after its checkpoint was saved; call it on all ranks."""
    for each in _callbacks(trainer):
        scores = each.best_k_models
        if removed := [path for path in scores if not each.file_exists(path, trainer)]:
            kept = {path: score for path, score in scores.items() if path not in removed}
            choose = min if each.mode == "min" else max
            each.best_k_models = kept
            best = choose(kept.items(), key=lambda item: float(item[1]), default=("", None))
            each.best_model_path, each.best_model_score = best


def _callbacks(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
