"""Goal 11's peer: torchrun by_torchrun.py SETTINGS.json, DistributedDataParallel on gloo."""

import json
import sys
from pathlib import Path

from plain_training import train
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

if __name__ == "__main__":
    distributed.init_process_group("gloo")
    train(
        json.loads(Path(sys.argv[1]).read_text()),
        lambda network: DistributedDataParallel(network, gradient_as_bucket_view=True),
        DistributedSampler,
        lambda metrics: print(metrics, flush=True),
    )
    distributed.destroy_process_group()
