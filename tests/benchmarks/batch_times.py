"""A callback of Lightning that writes when each batch ended; copied next to the user's code of a benchmark."""

import json
import time
from pathlib import Path

from lightning.pytorch import Callback


class BatchTimes(Callback):
    """Writes the seconds since the epoch at the end of each training batch."""

    def __init__(self, path: str):
        self.path, self.times = path, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.times.append(time.time())

    def on_train_end(self, trainer, pl_module):
        Path(self.path).write_text(json.dumps(self.times))


class BatchLog(Callback):
    """Adds the same to a file after each batch."""

    def __init__(self, path: str):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with Path(self.path).open("a") as file:
            print(time.time(), file=file)
