"""A small GPT on bytes."""

from typing import ClassVar

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention to what came before, and a perceptron."""

    def __init__(self, width, num_heads, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x_NLC):
        query, key, value = (
            each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in self.attend(self.norms[0](x_NLC)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_NLC = x_NLC + self.join(attended.transpose(1, 2).flatten(2))
        return x_NLC + self.think(self.norms[1](x_NLC))


class GPT(pl.LightningModule):
    """Predicts the next byte."""

    paceline: ClassVar = {"units": {"tokens": "bytes"}}  # each byte is a token

    def __init__(
        self,
        width: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        length: int = 64,
        dropout: float = 0.1,
        learning_rate: float = 3e-3,
        num_new_bytes: int = 32,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.place = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(depth)))
        self.norm, self.predict_byte = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, bytes_NL):
        x_NLC = self.embed(bytes_NL) + self.place[: bytes_NL.shape[1]]
        return self.predict_byte(self.norm(self.blocks(x_NLC)))

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), sync_dist=True, prog_bar=True)

    def predict_step(self, batch, batch_idx):
        """Continue each text by the likeliest bytes."""
        bytes_NL, length = batch["bytes"], batch["bytes"].shape[1]
        chances = []
        for _ in range(self.hparams.num_new_bytes):
            best = torch.softmax(self(bytes_NL[:, -self.hparams.length :])[:, -1].float(), dim=-1).max(dim=-1)
            bytes_NL = torch.cat([bytes_NL, best.indices[:, None]], dim=1)
            chances.append(best.values)
        texts = [bytes(row) for row in bytes_NL.tolist()]
        return {
            "prompt": [text[:length].decode(errors="replace") for text in texts],
            "continuation": [text[length:].decode(errors="replace") for text in texts],
            "probability": torch.stack(chances, dim=1),
        }

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loss(self, batch):
        return functional.cross_entropy(self(batch["bytes"]).flatten(0, 1), batch["next"].flatten())
