"""A callback of Lightning that writes when each batch ended; copied next to the user's code of a benchmark."""

import time
from pathlib import Path

from lightning.pytorch import Callback


class BatchTimes(Callback):
    """Adds the seconds since the epoch to a file at the end of each training batch."""

    def __init__(self, path: str):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with Path(self.path).open("a") as file:
            print(time.time(), file=file)
