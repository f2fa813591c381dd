"""Loaded by every Python whose PYTHONPATH names this folder: makes ranks slow, as PLANT says.

PLANT is `input`, `exchange`, `update`, `contention` or a rank such as `rank-1`, and seconds, such as input=0.001: for
each sample read, for each all-reduce of a step, for each update of the weights, for each sample while other ranks
compute too, or for each sample that this one rank trains on. HEAT is a folder to read in place of
/sys/devices/system/cpu. BLIND makes them train on black images.
WAITING makes them read each loss, which no CUDA graph can. LOUD makes them log what no library should, and fail with
it. MEMORY is the largest number of samples of a pass for which a device has memory, of one rank alone where one is
named, such as rank-1=32; ARM_MEMORY the same for what is timed before a training. ARM_COPY is a value of a setting,
such as foreground, with which an arm's copy has no memory. SET_MEMORY leaves none for a resident set. UPDATE_MEMORY
is a number of samples and a step, such as 32=30: passes of more samples leave the update of that step without memory,
half done. SAVE_SECONDS is the least time between two checkpoints where the configuration leaves it open, without an
assumption about failures, SAVE_SHARE the part of the time that they may take, and SAVE_COST what each takes longer.
SLOW_ARITHMETIC is a precision, bf16, tf32 or fp32, in which each sample of a step takes so many seconds more, such as
bf16=0.002 or fp32+tf32=0.002, and LAYER_SECONDS the
least time in which to find that out. HOLD is a file: as long as it exists, no sample is read. RENEWAL is the time
between two renewals of the concurrency lease of a flow in a process of its own, in seconds. LOOP_KILLED is a number of
requests, after which the process of the competent loop is killed; of one rank alone where one is named, such as
rank-1=3.
"""

import os
import sys
import time

if "paceline.tasks.train.rank.main" in sys.orig_argv and "BLIND" in os.environ:
    from paceline.tasks.model import optimization as objective

    seeing = objective.batch_loss
    objective.batch_loss = lambda network, batch, *more: seeing(
        network, batch._replace(images_NCHW=batch.images_NCHW * 0), *more
    )

if "paceline.tasks.train.rank.main" in sys.orig_argv and "WAITING" in os.environ:
    from paceline.tasks.model import optimization as objective

    asynchronous = objective.batch_loss

    def wait_for_loss(*arguments):
        loss = asynchronous(*arguments)
        loss.item()
        return loss

    objective.batch_loss = wait_for_loss

if "paceline.tasks.train.rank.main" in sys.orig_argv and "LOOP_KILLED" in os.environ:
    import itertools

    from paceline.tasks.train.competent.process import LoopProcess

    *killing_rank, last_request = os.environ["LOOP_KILLED"].split("=")
    asking, requests = LoopProcess.ask, itertools.count()

    def ask(process, request, seconds):
        if next(requests) == int(last_request):
            process._process.kill()
        return asking(process, request, seconds)

    if not killing_rank or f"/{killing_rank[0]}/" in sys.orig_argv[-1]:
        LoopProcess.ask = ask

if "paceline.tasks.train.rank.main" in sys.orig_argv and "MEMORY" in os.environ:
    import torch

    from paceline.tasks.model import optimization as objective

    *named, most = os.environ["MEMORY"].split("=")
    fitting = objective.batch_loss

    def limited(network, batch, *more):
        if len(batch.labels_N) > int(most):
            raise torch.OutOfMemoryError(f"CUDA out of memory, planted above {most} samples")
        return fitting(network, batch, *more)

    if not named or f"/{named[0]}/" in sys.orig_argv[-1]:
        objective.batch_loss = limited

if "paceline.tasks.train.rank.main" in sys.orig_argv and "ARM_MEMORY" in os.environ:
    import torch

    from paceline.tasks.train.step import benchmark_step as bare_step

    training = bare_step.batch_loss

    def limited_arm(network, batch, *more):
        if len(batch.labels_N) > int(os.environ["ARM_MEMORY"]):
            raise torch.OutOfMemoryError("CUDA out of memory, planted for what is timed")
        return training(network, batch, *more)

    bare_step.batch_loss = limited_arm

if "paceline.tasks.train.rank.main" in sys.orig_argv and "ARM_COPY" in os.environ:
    import torch

    from paceline.tasks.train.step import benchmark_step

    def copy_arm(network, precision, channels_last, device):
        arm = sys._getframe(1).f_locals["arm"]
        if os.environ["ARM_COPY"] in (arm.variant, arm.loading):
            raise RuntimeError("CUDA error: out of memory")
        return prepare_copy(network, precision, channels_last, device)

    prepare_copy = benchmark_step.prepare_network
    benchmark_step.prepare_network = copy_arm

if "paceline.tasks.train.rank.main" in sys.orig_argv and "SET_MEMORY" in os.environ:
    import torch

    from paceline.tasks.data.loading import resident

    def load_nothing(feed):
        raise torch.OutOfMemoryError("CUDA out of memory, planted for the set")

    resident._load = load_nothing

if "paceline.tasks.train.rank.main" in sys.orig_argv and "UPDATE_MEMORY" in os.environ:
    import torch

    from paceline.tasks.model import optimization

    largest, far = map(int, os.environ["UPDATE_MEMORY"].split("="))
    passes, num_updates = [0], [0]
    pass_loss, update = optimization.batch_loss, torch.amp.GradScaler.step

    def note_pass(network, batch, *others):
        passes[0] = len(batch.labels_N)
        return pass_loss(network, batch, *others)

    def half_update(self, optimizer, *others, **more):
        num_updates[0] += 1
        if passes[0] > largest and num_updates[0] >= far:
            optimizer.param_groups[0]["params"][0].data.add_(1e3)
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return update(self, optimizer, *others, **more)

    optimization.batch_loss, torch.amp.GradScaler.step = note_pass, half_update

if "paceline.tasks.train.rank.main" in sys.orig_argv and "SLOW_ARITHMETIC" in os.environ:
    import torch

    from paceline.tasks.model import optimization as objective

    slow, _, more = os.environ["SLOW_ARITHMETIC"].partition("=")
    computing = objective.batch_loss

    def computes():
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return "bf16"
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"

    def slow_loss(network, batch, *others):
        if computes() in slow.split("+"):
            time.sleep(float(more) * len(batch.labels_N))
        return computing(network, batch, *others)

    objective.batch_loss = slow_loss
    if "LAYER_SECONDS" in os.environ:
        from paceline.tasks.train.autotune import search

        search.LAYER_SECONDS = float(os.environ["LAYER_SECONDS"])

if "paceline.tasks.train.rank.main" in sys.orig_argv and "SAVE_SECONDS" in os.environ:
    from paceline.tasks.train import checkpoint_interval as interval

    interval.MIN_SECONDS = float(os.environ["SAVE_SECONDS"])
    interval.MAX_SHARE = float(os.environ.get("SAVE_SHARE", interval.MAX_SHARE))
    interval.PRIOR_HOURS = 0.0

if "paceline.tasks.train.rank.main" in sys.orig_argv and "SAVE_COST" in os.environ:
    from paceline.tasks.train.rank import checkpoint_io

    save = checkpoint_io.AtomicCheckpointIO.save_checkpoint
    checkpoint_io.AtomicCheckpointIO.save_checkpoint = lambda *arguments, **more: (
        time.sleep(float(os.environ["SAVE_COST"])),
        save(*arguments, **more),
    )[1]

if "paceline.tasks.train.rank.main" in sys.orig_argv and "LOUD" in os.environ:
    import logging

    from paceline.tasks.model import optimization as objective

    def fail(*_):
        said = os.environ["LOUD"].format_map(os.environ)
        logging.getLogger("loud").warning("trying %s", said)
        try:
            raise ConnectionRefusedError(said)
        except ConnectionRefusedError as error:
            raise ValueError(f"no answer from {said}") from error

    objective.batch_loss = fail

if "prefect.engine" in sys.orig_argv and "RENEWAL" in os.environ:
    from prefect.concurrency import _leases

    _leases._RENEWAL_FRACTION = float(os.environ["RENEWAL"]) / 300

if "paceline.tasks.train.rank.main" in sys.orig_argv and "HOLD" in os.environ:
    from pathlib import Path

    from paceline.tasks.data.split import Split

    read_on = Split.image

    def wait_and_read(self, index):
        while Path(os.environ["HOLD"]).exists():
            time.sleep(0.1)
        return read_on(self, index)

    Split.image = wait_and_read

if "paceline.tasks.train.rank.main" in sys.orig_argv and "HEAT" in os.environ:
    from pathlib import Path

    from paceline.tasks.measure import validity

    validity._num_cpu_brakes.__defaults__ = (Path(os.environ["HEAT"]),)

if "paceline.tasks.train.rank.main" in sys.orig_argv and "PLANT" in os.environ:
    where, _, delay = os.environ["PLANT"].partition("=")
    if where == "input":
        from paceline.tasks.data.split import Split

        read = Split.image
        Split.image = lambda self, index: (time.sleep(float(delay)), read(self, index))[1]
    elif where == "update":
        import torch

        take = torch.amp.GradScaler.step
        torch.amp.GradScaler.step = lambda *arguments, **more: (time.sleep(float(delay)), take(*arguments, **more))[1]
    elif where == "contention":
        import fcntl
        from pathlib import Path

        from paceline.tasks.train.step import benchmark_step as shared_step

        rank = Path(sys.orig_argv[-1]).parent
        inside = (rank.parent / f"{rank.name}.inside").open("w")  # locked while this rank runs steps of an arm
        run_steps, compute_alone = shared_step.BareStep.run, shared_step.batch_loss

        def run_inside(self, num_steps):
            fcntl.flock(inside, fcntl.LOCK_EX)
            try:
                return run_steps(self, num_steps)
            finally:
                fcntl.flock(inside, fcntl.LOCK_UN)

        def is_inside(path):
            with path.open() as other:
                try:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
                return False

        def compute_next_to_others(network, batch, *more):
            others = set(rank.parent.glob("rank-*.inside")) - {Path(inside.name)}
            time.sleep(float(delay) * len(batch.labels_N) * any(map(is_inside, others)))
            return compute_alone(network, batch, *more)

        shared_step.BareStep.run, shared_step.batch_loss = run_inside, compute_next_to_others
    elif where.startswith("rank-"):
        if f"/{where}/" in sys.orig_argv[-1]:
            from paceline.tasks.model import optimization as objective

            compute = objective.batch_loss
            objective.batch_loss = lambda network, batch, *more: (
                time.sleep(float(delay) * len(batch.labels_N)),
                compute(network, batch, *more),
            )[1]
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
