"""Further modules of the shapes that public scripts have; nothing is imported from Paceline."""

import math
import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from shapes import Autoencoder
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

NUM_CLASSES, NUM_TOKENS, PADDING = 4, 20, 0


def drawn(seed):
    return torch.Generator().manual_seed(seed)


class Pictures(pl.LightningDataModule):
    """Images of noise with a brighter quarter; it is the class."""

    def __init__(self, num_samples: int = 192, batch_size: int = 16, size: int = 8):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        size = self.hparams.size
        labels = torch.arange(self.hparams.num_samples) % NUM_CLASSES
        images = torch.rand(self.hparams.num_samples, 1, size, size, generator=drawn(1))
        for image, label in zip(images, labels.tolist(), strict=True):
            row, column = divmod(label, 2)
            image[0, row * size // 2 :, column * size // 2 :][: size // 2, : size // 2] += 0.5
        self.train, self.val = random_split(TensorDataset(images, labels), [0.75, 0.25], generator=drawn(2))

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size // 2)


class Perceptron(pl.LightningModule):
    """The first example of the documentation: a loss, a metric, lists of optimizers and schedules."""

    def __init__(self, size: int = 8, width: int = 32, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(size * size, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, NUM_CLASSES)
        )
        self.accuracy = MulticlassAccuracy(NUM_CLASSES)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = functional.cross_entropy(self.layers(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy(self.layers(images), labels)
        self.log("val/accuracy", self.accuracy, on_epoch=True)

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("test/loss", functional.cross_entropy(self.layers(images), labels))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Convolutions(pl.LightningModule):
    """Batch norms, hooks, a checkpoint with more in it, and SGD on groups of weights."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.head = nn.Linear(4 * width, NUM_CLASSES)
        self.num_seen = 0

    def forward(self, images):
        return self.head(self.body(images).flatten(1))

    def on_train_epoch_start(self):
        self.log("seen", float(self.num_seen))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        self.num_seen += len(images)
        if torch.rand(()) < 0.5:  # an augmentation
            images = images.flip(3)
            labels = labels ^ 1
        loss = functional.cross_entropy(self(images), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["num_seen"] = self.num_seen

    def on_load_checkpoint(self, checkpoint):
        self.num_seen = checkpoint["num_seen"]

    def configure_optimizers(self):
        groups = [{"params": self.body.parameters(), "lr": 0.02}, {"params": self.head.parameters()}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


class VariationalAutoencoder(pl.LightningModule):
    """Random numbers in the step, and several metrics at once."""

    def __init__(self, size: int = 8, latent: int = 4):
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(size * size, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent, size * size), nn.Unflatten(1, (1, size, size)))

    def training_step(self, batch, batch_idx):
        images, _ = batch
        mean, log_variance = self.encode(images).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        reconstruction = functional.mse_loss(self.decode(latent), images, reduction="sum") / len(images)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        self.log_dict({"reconstruction": reconstruction, "divergence": divergence}, on_step=True, on_epoch=False)
        return {"loss": reconstruction + 0.1 * divergence, "mean": mean.detach()}

    def configure_optimizers(self):
        return {"optimizer": torch.optim.Adam(self.parameters(), lr=1e-3)}


class Sentences(Dataset):
    """Tokens of different lengths; the tag says whether a token is greater than the one before."""

    def __init__(self, num_samples):
        lengths = torch.randint(3, 12, (num_samples,), generator=drawn(3))
        generator = drawn(4)
        self.rows = [torch.randint(1, NUM_TOKENS, (int(length),), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        tokens = self.rows[index]
        return tokens, torch.cat([torch.zeros(1), (tokens[1:] > tokens[:-1]).float()])


def pad(rows):
    tokens, tags = zip(*rows, strict=True)
    padded = nn.utils.rnn.pad_sequence(list(tokens), batch_first=True, padding_value=PADDING)
    tags = nn.utils.rnn.pad_sequence(list(tags), batch_first=True)
    return {"tokens": padded, "tags": tags, "lengths": torch.tensor([len(row) for row in tokens])}


class Corpus(pl.LightningDataModule):
    """Sentences in dictionaries, padded."""

    def __init__(self, num_samples: int = 128, batch_size: int = 16, num_workers: int = 0):
        super().__init__()
        self.num_samples, self.batch_size, self.num_workers = num_samples, batch_size, num_workers

    def setup(self, stage=None):
        self.train, self.val = random_split(Sentences(self.num_samples), [0.75, 0.25], generator=drawn(5))

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=pad, num_workers=self.num_workers)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, collate_fn=pad)


class Tagger(pl.LightningModule):
    """A recurrent network whose learning rate falls when the validation does not."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, width, padding_idx=PADDING)
        self.recur, self.tag = nn.LSTM(width, width, batch_first=True, bidirectional=True), nn.Linear(2 * width, 1)

    def loss(self, batch):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(batch["tokens"]), batch["lengths"].cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = nn.utils.rnn.pad_packed_sequence(self.recur(packed)[0], batch_first=True)
        losses = functional.binary_cross_entropy_with_logits(
            self.tag(states).squeeze(2), batch["tags"], reduction="none"
        )
        return losses[batch["tokens"] != PADDING].mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch["tokens"]))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=len(batch["tokens"]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Encoder(pl.LightningModule):
    """An encoder whose output is a dictionary with the loss in it, warmed up by a function of the step."""

    def __init__(self, width: int = 16, num_layers: int = 2, warmup_steps: int = 4):
        super().__init__()
        self.save_hyperparameters()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(NUM_TOKENS, width, padding_idx=PADDING)
        self.encode = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.tag = nn.Linear(width, 1)

    def forward(self, tokens, tags=None, **rest):
        padding = tokens == PADDING
        logits = self.tag(self.encode(self.embed(tokens), src_key_padding_mask=padding)).squeeze(2)
        losses = functional.binary_cross_entropy_with_logits(logits, tags, reduction="none")
        return {"loss": losses[~padding].mean(), "logits": logits}

    def training_step(self, batch, batch_idx):
        output = self(**batch)
        self.log("train_loss", output["loss"], batch_size=len(batch["tokens"]))
        return output["loss"]

    def on_before_optimizer_step(self, optimizer):
        norms = [each.grad.norm() for each in self.parameters() if each.grad is not None]
        self.log("gradient_norm", torch.stack(norms).norm())

    def configure_optimizers(self):
        decayed = [each for each in self.parameters() if each.ndim > 1]
        others = [each for each in self.parameters() if each.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / self.hparams.warmup_steps)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Pairs(IterableDataset):
    """A stream of two noisy views and whether they are of one thing."""

    def __iter__(self):
        generator = drawn(6)
        while True:
            first, other = torch.randn(2, 6, generator=generator)
            same = torch.rand((), generator=generator) < 0.5
            noise = 0.1 * torch.randn(2, 6, generator=generator)
            yield (first + noise[0], (first if same else other) + noise[1]), same.float()


class PairStream(pl.LightningDataModule):
    """A stream without length."""

    def train_dataloader(self):
        return DataLoader(Pairs(), batch_size=16)


class Contrast(pl.LightningModule):
    """Nested tuples as batches; the step count ends the training."""

    def __init__(self, width: int = 8, margin: float = 1.0):
        super().__init__()
        self.margin, self.embed = margin, nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))

    def training_step(self, batch, batch_idx):
        (first, second), same = batch
        distance = (self.embed(first) - self.embed(second)).square().sum(1)
        loss = torch.where(same > 0, distance, functional.relu(self.margin - distance)).mean()
        self.log("contrast", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("norm", self.embed[0].weight.norm())

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=math.exp(-5))


class Line(pl.LightningModule):
    """LBFGS, which asks for the loss several times in a step."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.fit = nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        loss = functional.mse_loss(self.fit(batch[0]), batch[0].sum(1, keepdim=True).sin())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


class Share(IterableDataset):
    """The samples of one rank, which the variables of a launcher name."""

    def __iter__(self):
        rank, num_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        yield from torch.randn(64, 1, 8, generator=drawn(9))[rank::num_ranks]


class Shares(pl.LightningDataModule):
    """Shares without length."""

    def train_dataloader(self):
        return DataLoader(Share(), batch_size=4)


class Diarist(Autoencoder):
    """Writes through the logger that every script has."""

    def training_step(self, batch, batch_idx):
        writer = self.logger.experiment
        assert writer is not None
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        directory = Path(self.logger.log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "notes.txt").open("a") as notes:
            notes.write(f"epoch {self.current_epoch}\n")
