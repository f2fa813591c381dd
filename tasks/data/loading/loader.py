"""Chooses the training loader that an execution names. The choice of `auto` is made elsewhere."""

from __future__ import annotations

from paceline.conf.execution import Loading
from paceline.tasks.data.loading.foreground import ForegroundLoader
from paceline.tasks.data.loading.resident import ResidentLoader
from paceline.tasks.data.loading.streaming import StreamingLoader
from paceline.tasks.data.loading.train_loader import LoaderConfig, TrainLoader

_LOADERS: dict[Loading, type[TrainLoader]] = {
    "resident": ResidentLoader,
    "streaming": StreamingLoader,
    "foreground": ForegroundLoader,
}


def make_loader(loading: Loading, config: LoaderConfig) -> TrainLoader:
    """Make a training loader; all kinds deliver the same batches in the same order, bit for bit on one device."""
    return _LOADERS[loading](config)
