"""How Lightning runs a group of ranks: its own strategies, with what they leave out."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from conf.schema import Compression
from tasks.train.exchange import DDP_SETTINGS, compress_gradients


class ExchangeStrategy(DDPStrategy):
    """Lightning's strategy with compression on every device: its own hooks are left out, silently, off GPUs (2.6.6)."""

    def __init__(self, compression: Compression) -> None:
        super().__init__(**DDP_SETTINGS)  # type: ignore[arg-type]
        self._compression = compression

    def configure_ddp(self) -> None:
        """Wrap the model, then compress."""
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        compress_gradients(self.model, self._compression)
