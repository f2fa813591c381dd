"""How ranks exchange gradients: one setting of DistributedDataParallel for training and for the probe's bare steps.

Knows nothing of steps or data.
"""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from conf.execution import Compression

# One bucket view, no buffer broadcast: see FACTS in infra/decisions/0003.
DDP_SETTINGS = {"gradient_as_bucket_view": True, "broadcast_buffers": False}


def compress_gradients(wrapped: DistributedDataParallel, compression: Compression) -> None:
    """Exchange gradients in fewer bits; `off` leaves them as they are. The ranks' sum is rounded too."""
    if compression == "bf16":
        # By its own name torch takes the hook on NCCL alone, though gloo sums bf16 as well (torch 2.13). A lambda,
        # because torch rejects annotations that are text, as those of this module are.
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))  # noqa: PLW0108
