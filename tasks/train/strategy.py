"""How Lightning runs a group of ranks: its own strategies, with what they leave out."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.nn.parallel import DistributedDataParallel

from conf.execution import Compression
from tasks.model.lightning_module import Learner
from tasks.train.step.distributed import DDP_SETTINGS, compress_gradients
from tasks.train.sharding import shard


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


class ShardedLearner(Learner):
    """A learner whose network is sharded once Lightning has the mesh of ranks."""

    def configure_model(self) -> None:
        """Shard; Lightning may call it more than once."""
        assert self.device_mesh is not None
        shard(self.network, self.device_mesh["data_parallel"])


def sharding_strategy(world_size: int) -> ModelParallelStrategy:
    """All ranks share the data and none the layers; a checkpoint is one file of whole weights, as others are."""
    return ModelParallelStrategy(
        data_parallel_size=world_size, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
