"""A module and its data that note each call of a hook of Lightning's; nothing is imported from Paceline."""

import inspect

import more_shapes
from lightning.pytorch.core.hooks import DataHooks, ModelHooks

CALLS = []
LOADERS = {name for name in vars(DataHooks) if name.endswith("_dataloader")}
OF_MODULE = (
    {
        *(name for hooks in (ModelHooks, DataHooks) for name in vars(hooks) if inspect.isfunction(vars(hooks)[name])),
        *("configure_optimizers", "configure_callbacks", "configure_gradient_clipping", "lr_scheduler_step"),
        *("backward", "optimizer_step", "optimizer_zero_grad", "training_step", "validation_step", "test_step"),
    }
    - LOADERS
    - {"__init__", "configure_sharded_model", "prepare_data"}
)  # the last runs once, before a training
OF_DATA = {"setup", "teardown", "train_dataloader", "val_dataloader", "test_dataloader"}


def noting(names):
    """Note in `CALLS` the class and the name of each call of some methods."""

    def wrap(owner):
        for name in names:
            setattr(owner, name, noted(owner, name, getattr(owner, name)))
        return owner

    return wrap


def noted(owner, name, method):
    def call(self, *values, **named):
        CALLS.append(f"{owner.__name__}.{name}")
        return method(self, *values, **named)

    return call


@noting(OF_MODULE)
class Noted(more_shapes.Perceptron):
    """Calls each hook as its parent does."""


@noting(OF_DATA)
class NotedData(more_shapes.Pictures):
    """Two hooks more, for what a checkpoint keeps of the data."""

    def state_dict(self):
        return {"note": "saved"}

    def load_state_dict(self, kept):
        CALLS.append(f"NotedData.load_state_dict {kept['note']}")
