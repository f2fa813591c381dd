"""Loaded by every Python whose PYTHONPATH names this folder: makes a rank's input or its exchange slow, as PLANT says.

PLANT is `input` or `exchange` and seconds, such as input=0.001: for each sample read, or for each all-reduce of a step.
"""

import os
import sys
import time

if "tasks.train.worker" in sys.orig_argv and "PLANT" in os.environ:
    where, _, delay = os.environ["PLANT"].partition("=")
    if where == "input":
        from tasks.data.split import Split

        read = Split.image
        Split.image = lambda self, index: (time.sleep(float(delay)), read(self, index))[1]
    else:
        from torch import distributed
        from torch.nn.parallel import DistributedDataParallel

        wrap = DistributedDataParallel.__init__

        def slow_all_reduce(state, bucket):
            time.sleep(float(delay))
            return distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda _: bucket.buffer())

        def slow_init(self, *arguments, **settings):
            wrap(self, *arguments, **settings)
            self.register_comm_hook(None, slow_all_reduce)

        DistributedDataParallel.__init__ = slow_init
