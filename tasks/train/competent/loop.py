"""A training loop as a good engineer writes it in plain PyTorch: the baseline of a sceptic.

The program of a process of its own, without Paceline: `python -P loop.py DESCRIPTOR`. It waits at a connection for
requests, and uses no processor between them. Shapes: N samples, H height, W width, C channels, T targets.
"""

import copy
import json
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

Job = dict[str, Any]  # of plain values and tensors; `arm.py` fills it
NUM_EVALUATIONS = 5
LIMIT = timedelta(seconds=60)


class Samples(Dataset[tuple[Tensor, ...]]):
    """Augmented batches (images of uint8, labels, targets) from memory-mapped arrays."""

    def __init__(self, job: Job) -> None:
        self._shards = [np.asarray(np.load(path, mmap_mode="r")) for path in job["images"]]
        self._ends = np.cumsum([len(shard) for shard in self._shards])
        self._labels_N, self._targets_NT = job["labels"], job["targets"]
        self._shift, self._flip = job["shift"], job["flip"]

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, ...]:
        shards_N = np.searchsorted(self._ends, indices, side="right")
        images = np.stack([self._shards[k][i - self._ends[k]] for k, i in zip(shards_N, indices, strict=True)])
        num, height, width, _ = images.shape
        if self._shift:
            padded = np.pad(images, ((0, 0), (self._shift,) * 2, (self._shift,) * 2, (0, 0)))
            corners = zip(padded, *torch.randint(2 * self._shift + 1, (2, num)).tolist(), strict=True)
            images = np.stack([image[top : top + height, left : left + width] for image, top, left in corners])
        if self._flip:
            flipped_N = torch.randint(2, (num,)).numpy() == 1
            images[flipped_N] = images[flipped_N, :, ::-1]
        return torch.from_numpy(images), self._labels_N[indices], self._targets_NT[indices]


class Batches(Sampler[list[int]]):
    """Shuffled batches, epoch after epoch; an iteration has `number` of them, so that workers read no more."""

    number = 0

    def __init__(self, num_samples: int, size: int) -> None:
        self._num_samples, self._size = num_samples, min(size, num_samples)
        self._rest: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.number):
            if len(self._rest) < self._size:
                self._rest = torch.randperm(self._num_samples).tolist()
            batch, self._rest = self._rest[: self._size], self._rest[self._size :]
            yield batch


class Training:
    """The loop."""

    def __init__(self, job: Job) -> None:
        self._job, self._device = job, torch.device(job["device"])
        self._on_gpu = self._device.type == "cuda"
        torch.manual_seed(job["seed"])
        if torch.get_num_threads() != job["num_threads"]:  # setting it slows attention: MKL_DYNAMIC becomes false
            torch.set_num_threads(job["num_threads"])
        if self._on_gpu:
            torch.cuda.set_device(self._device)
            torch.set_float32_matmul_precision("high" if job["tf32"] else "highest")
            torch.backends.cudnn.allow_tf32 = job["tf32"]
            torch.backends.cudnn.benchmark = True
        self._batches = Batches(len(job["labels"]), job["batch_size"])
        self._loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
            Samples(job),
            sampler=self._batches,
            batch_size=None,
            num_workers=job["num_workers"],
            persistent_workers=True,
            pin_memory=self._on_gpu,
            multiprocessing_context="fork",
        )
        self._dtype = getattr(torch, job["dtype"])
        self._layout = torch.channels_last if job["channels_last"] else torch.contiguous_format
        self._bare = pickle.loads(job["network"]).to(self._device, self._dtype, memory_format=self._layout)
        weights = [weight for weight in self._bare.parameters() if weight.requires_grad]
        self._optimizer = getattr(torch.optim, job["optimizer"])(weights, **job["optimizer_settings"], fused=True)
        self._network: Any = torch.compile(self._bare) if job["compile"] else self._bare
        if job["world_size"] > 1:
            _join(job)
            self._network = DistributedDataParallel(self._network)
        scales = (torch.tensor(job[name], dtype=self._dtype, device=self._device) for name in ("mean", "std"))
        self._mean_C11, self._std_C11 = (scale.view(-1, 1, 1) for scale in scales)
        half = job["autocast"]
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=half == "float16")
        half_type = getattr(torch, half or "bfloat16")
        self._autocast = torch.autocast(self._device.type, half_type, enabled=half is not None)

    def run(self, num_steps: int) -> list[float]:
        """Seconds of each step, after one that fills the queues of the workers and is not timed."""
        batches = self._draw(num_steps + 1)
        self._step(next(batches))
        self._synchronize()
        times = [time.perf_counter()]
        for batch in batches:
            self._step(batch)
            if not self._on_gpu or len(times) == num_steps:
                self._synchronize()
            times.append(time.perf_counter())
        if self._on_gpu:  # the host runs ahead of the device
            return [(times[-1] - times[0]) / num_steps] * num_steps
        return np.diff(times).tolist()

    def costs(self) -> dict[str, Any]:
        """Seconds of evaluating a sample, several times, and of recording a result."""
        network, times = copy.deepcopy(self._bare).eval(), []
        for _ in range(NUM_EVALUATIONS):
            batches = self._draw(2)
            next(batches)
            started = time.perf_counter()
            images, labels_N, _ = self._on_device(next(batches))
            with torch.no_grad(), self._autocast:
                network(images[:, : self._job["num_channels"]])[0].argmax(1).sum().item()  # waits for the device
            times.append((time.perf_counter() - started) / len(labels_N))
        started = time.perf_counter()
        with tempfile.TemporaryFile(dir=self._job["directory"]) as file:
            torch.save(network.state_dict(), file)
            file.write(json.dumps({"accuracy": 0.0}).encode())
        return {"evaluation_seconds": times, "record_seconds": time.perf_counter() - started}

    def _draw(self, number: int) -> Iterator[tuple[Tensor, ...]]:
        self._batches.number = number
        return iter(self._loader)

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _step(self, batch: tuple[Tensor, ...]) -> None:
        images, labels_N, targets_NT = self._on_device(batch)
        self._optimizer.zero_grad()
        with self._autocast:
            loss = self._loss(images, labels_N, targets_NT)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _on_device(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        images_NHWC, *others = (part.to(self._device, non_blocking=True) for part in batch)
        images = images_NHWC.permute(0, 3, 1, 2).to(self._dtype, memory_format=self._layout).div_(255.0)
        return (images.sub_(self._mean_C11).div_(self._std_C11), *others)

    def _loss(self, images: Tensor, labels_N: Tensor, targets_NT: Tensor) -> Tensor:
        job = self._job
        if job["task"] == "denoise":
            noise = torch.randn_like(images).mul_(job["noise"] / 255.0).div_(self._std_C11)
            return functional.mse_loss(self._network(images + noise)[0].float(), images.float())
        if job["task"] == "segment":  # the last channel is the class of each pixel
            images, labels_N = images[:, :-1], images[:, -1].round().long() - 1
        logits, predicted_NT = self._network(images)
        loss = functional.cross_entropy(logits, labels_N, ignore_index=-1, label_smoothing=job["label_smoothing"])
        if predicted_NT is not None:
            loss = loss + job["target_weight"] * functional.mse_loss(predicted_NT, targets_NT.to(predicted_NT.dtype))
        return loss


def _join(job: Job) -> None:
    (host, port), rank, world_size = job["address"], job["rank"], job["world_size"]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Rank 0 listens on this address alone; torch by itself listens on all.
    listening = socket.create_server((host, port), family=family).detach() if rank == 0 else None
    store = distributed.TCPStore(  # type: ignore[attr-defined]  # stubs do not export it
        host, port, world_size, rank == 0, LIMIT, False, master_listen_fd=listening
    )
    backend = "nccl" if job["device"].startswith("cuda") else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=LIMIT)


def serve(connection: Connection) -> None:
    """Answer requests until the other end is closed: first a job, then numbers of steps."""
    start = time.process_time()  # of the processor, because other work starts at the same time
    training: Training | None = None
    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            if training is None:
                started = time.perf_counter()
                training = Training(request)
                training.run(1)
                built = {"start_seconds": start, "build_seconds": time.perf_counter() - started} | training.costs()
                modules = [name for name in sys.modules if name.partition(".")[0] == "paceline"]
                connection.send(("done", built | {"modules": modules}))
            else:
                connection.send(("done", training.run(request)))
        except Exception as error:  # noqa: BLE001  the rank reports it, and measures without this loop
            connection.send(("failed", f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
