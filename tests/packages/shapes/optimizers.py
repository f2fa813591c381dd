"""All that `configure_optimizers` may return, and all flags of `self.log`; nothing is imported from Paceline."""

import lightning.pytorch as pl
import shapes
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric


class Halves(shapes.Noise):
    """Noise, with its first and second half as two validation loaders."""

    def val_dataloader(self):
        half = len(self.samples) // 2
        return [DataLoader(self.samples[start : start + half][0], batch_size=20) for start in (0, half)]


class Regression(pl.LightningModule):
    """Predicts a sum. The optimizer is in the file."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, samples):
        return functional.mse_loss(self.layers(samples).squeeze(1), samples.sum(1))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def sgd(module, lr=0.05):
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)


def with_schedule(module, make=lambda optimizer: ExponentialLR(optimizer, 0.9), **options):
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **options}}


def in_lists(module):
    optimizer = sgd(module)
    return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step", "frequency": 3}]


def on_plateau(optimizer):
    return ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)


FORMS = {
    "optimizer": sgd,
    "list": lambda module: [sgd(module)],
    "tuple": lambda module: (sgd(module),),
    "dict": lambda module: {"optimizer": sgd(module)},
    "lists": in_lists,
    "schedule": lambda module: {"optimizer": (made := sgd(module)), "lr_scheduler": ExponentialLR(made, 0.5)},
    "step": lambda module: with_schedule(module, interval="step", name="rate"),
    "epoch": lambda module: with_schedule(module, interval="epoch", frequency=2),
    "plateau": lambda module: with_schedule(module, on_plateau, monitor="loss_epoch", strict=True),
    "plateau_step": lambda module: with_schedule(module, on_plateau, monitor="loss_step", interval="step"),
    "none": lambda module: None,
}


class Optimized(Regression):
    """One of the forms by its name."""

    def __init__(self, form: str = "optimizer", width: int = 8):
        super().__init__(width)
        self.form = form

    def configure_optimizers(self):
        return FORMS[self.form](self)


class TwoOptimizers(Regression):
    """Two dictionaries, of which the module takes the steps itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.manual_backward(loss)
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        made = [sgd(layer) for layer in (self.layers[0], self.layers[2])]
        return tuple({"optimizer": one, "lr_scheduler": ExponentialLR(one, 0.9)} for one in made)


class Logged(Regression):
    """All flags of `self.log`."""

    def __init__(self):
        super().__init__()
        self.means = nn.ModuleDict({"loss": MeanMetric()})

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        value = loss.detach()
        self.log("bar", value, prog_bar=True)
        self.log("each_step", value, on_step=True, on_epoch=False)
        self.log("each_epoch", value, on_step=False, on_epoch=True)
        for name in ("min", "max", "sum", "mean"):
            self.log(f"reduced/{name}", value, on_step=False, on_epoch=True, reduce_fx=name)
        self.log("synced", value, on_step=True, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("sized", value, on_epoch=True, batch_size=batch_idx + 1)
        self.log("not@logged", value, logger=False)
        self.log("odd@name", value)
        self.log("rank_0", float(self.global_rank), rank_zero_only=True)
        self.means["loss"](value)
        self.log("metric", self.means["loss"], on_step=True, on_epoch=True, metric_attribute="means.loss")
        self.log_dict({"first": value, "second": 2 * value}, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.log(f"half_{dataloader_idx}", loss, add_dataloader_idx=False, sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self):
        return sgd(self)


class Branching(Regression):
    """Its graph depends on the data; its author wants to hear of that."""

    @torch._dynamo.error_on_graph_break(True)
    def forward(self, samples):
        return self.layers(samples if samples.sum() > 0 else -samples)

    def loss(self, samples):
        return functional.mse_loss(self(samples).squeeze(1), samples.sum(1))

    def configure_optimizers(self):
        return sgd(self)


class InCode(LightningCLI):
    """As the documentation of Lightning shows it, for classes in the code."""

    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.width", "model.width")


class LinkedCLI(LightningCLI):
    """Links the width of the data to that of the module, and has an argument and a callback of its own."""

    def add_arguments_to_parser(self, parser):
        super().add_arguments_to_parser(parser)
        parser.link_arguments("data.init_args.width", "model.init_args.width")
        parser.add_argument("--note", default="none")
        parser.add_lightning_class_args(pl.callbacks.EarlyStopping, "stop_early")
        parser.set_defaults({"stop_early.monitor": "loss_epoch", "stop_early.patience": 50})
