"""The topics of Python's own help, prepared part by part."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from prose.corpus import Windows


class Topics(pl.LightningDataModule):
    """Windows of all topics as bytes, which are prepared in a few parts."""

    prepared_directory: Path | None = None
    """The directory with a folder for each part."""

    def __init__(self, num_parts: int = 2, length: int = 64, batch_size: int = 32):
        super().__init__()
        self.save_hyperparameters()

    def partitions(self):
        """The keys of the parts."""
        return [f"part-{number}" for number in range(self.hparams.num_parts)]

    def prepare_partition(self, key, directory):
        """Write one part into a directory of its own."""
        from pydoc_data.topics import topics

        first = int(key.removeprefix("part-"))
        texts = [topics[name] for name in sorted(topics)[first :: self.hparams.num_parts]]
        (directory / "topics.txt").write_text("\n".join(texts)[:20_000], encoding="utf-8")

    def setup(self, stage):
        """Read all parts."""
        content = b"".join(path.read_bytes() for path in sorted(self.prepared_directory.glob("*/topics.txt")))
        text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
        split = int(0.9 * len(text))
        self.train = Windows(text[:split], self.hparams.length, self.hparams.length)
        self.validation = Windows(text[split:], self.hparams.length, self.hparams.length)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.validation, batch_size=self.hparams.batch_size)

    def predict_dataloader(self):
        return self.val_dataloader()
