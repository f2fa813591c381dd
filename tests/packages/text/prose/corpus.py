"""The topics of Python's own help as bytes of English text."""

import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    """Overlapping windows of a text, each with the text one byte later."""

    def __init__(self, text, length, stride):
        self.text, self.length, self.stride = text, length, stride

    def __len__(self):
        return (len(self.text) - self.length - 1) // self.stride

    def __getitem__(self, index):
        start = index * self.stride
        window = self.text[start : start + self.length + 1]
        return {"bytes": window[:-1], "next": window[1:]}


class Corpus(pl.LightningDataModule):
    """The text, written once by `prepare_data`."""

    def __init__(
        self, directory: str, length: int = 64, batch_size: int = 32, num_bytes: int = 200_000, num_workers: int = 0
    ):
        super().__init__()
        self.save_hyperparameters()
        self.path = Path(directory) / "topics.txt"

    def prepare_data(self):
        from pydoc_data.topics import topics

        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}")
        part.write_text("\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
        part.replace(self.path)

    def setup(self, stage):
        text = torch.frombuffer(bytearray(self.path.read_bytes()[: self.hparams.num_bytes]), dtype=torch.uint8).long()
        split = int(0.9 * len(text))
        self.train = Windows(text[:split], self.hparams.length, self.hparams.length)
        self.validation = Windows(text[split:], self.hparams.length, self.hparams.length)

    def train_dataloader(self):
        size, workers = self.hparams.batch_size, self.hparams.num_workers
        return DataLoader(self.train, batch_size=size, shuffle=True, num_workers=workers)

    def predict_dataloader(self):
        size = self.hparams.batch_size
        return DataLoader(self.validation, batch_size=size)

    def val_dataloader(self):
        return DataLoader(self.validation, batch_size=self.hparams.batch_size)


class Prompts(pl.LightningDataModule):
    """A few texts to continue, one by one."""

    def __init__(self, texts: tuple[str, ...] = ("The import statement", "A class definition")):
        super().__init__()
        self.texts = texts

    def predict_dataloader(self):
        return DataLoader([{"bytes": torch.tensor(list(text.encode()))} for text in self.texts])
