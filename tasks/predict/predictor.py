"""A model as prediction executes it: batch norm folded, reduced precision, channels last, perhaps compiled ahead.

Shapes: N samples, H height, W width, C channels, M tiles.
"""

import fcntl
import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch

from paceline.conf.execution import Precision
from paceline.tasks.cluster.hardware import cpu_kind
from paceline.tasks.data.loading.batch import Normalise, set_layout
from paceline.tasks.files import private_directory
from paceline.tasks.model.inference import fold_batch_norm
from paceline.tasks.model.out_of_memory import is_out_of_memory
from paceline.tasks.model.pretrained import load_trained_model
from paceline.tasks.model.threads import use_threads
from paceline.tasks.model.transfer import reach_and_stride
from paceline.tasks.predict.job import Parity, Settings, batch_size_for
from paceline.tasks.predict.outputs import Arrays, Asked, compare_outputs, with_head
from paceline.tasks.predict.tiles import bands_of, grid_for, put
from paceline.tasks.train.step.precision import AUTOCAST_DTYPES, prepare_network, set_arithmetic

GPU_BATCH_BYTES = 16 * 2**20  # of pixels: a hundred photographs fill it, and the next ones are read meanwhile
MEMORY_SHARE = 0.5  # of the free memory of a GPU that a forward pass may take: its allocator leaves gaps
NUM_SHAPES = 8  # cached shapes of images, for their normalisation constants


class Predictor:
    """Predicts uint8 images; with `plain` as the model was trained: float32, eager, contiguous, nothing folded."""

    def __init__(self, settings: Settings, *, plain: bool = False) -> None:
        use_threads(settings.num_threads)
        network, self.facts = load_trained_model(Path(settings.model_directory), settings.model_digest)
        self.asked: Asked = self.facts.model.task if settings.layer is None else "features"
        self._device = torch.device("cuda", 0) if settings.gpu else torch.device("cpu")
        self._channels_last = not plain
        self._precision: Precision = "32-true" if plain else settings.precision
        self._dtype = DTYPES.get(self._precision, torch.float32)
        self._normalise = lru_cache(maxsize=NUM_SHAPES)(
            lambda shape: Normalise(self.facts.mean, self.facts.std, shape).to(self._device)
        )
        self._batch_size = settings.batch_size
        self._fitting: dict[tuple[int, ...], int] = {}
        """Images of a forward pass that fit into the memory of the GPU, by their shape."""
        self.num_readers = settings.num_threads if settings.gpu else 0  # threads that decode while the device predicts
        looks = reach_and_stride(network) if settings.own_size else None
        self._grid = None if looks is None else grid_for(*looks)
        self._is_compiled = settings.compiled is not None and not plain
        if settings.compiled is not None and not plain:
            package = str(_package(settings, Path(settings.compiled)))
            self._call: Callable[[torch.Tensor], Sequence[torch.Tensor]] = torch._inductor.aoti_load_package(package)
        else:
            # A layer gives something else once it does its neighbour's work.
            ready = network if plain or settings.layer is not None else fold_batch_norm(network)
            ready = prepare_network(ready, "32-true", self._channels_last, self._device).to(self._dtype)
            self._call = self.module = with_head(ready, self.facts, settings.layer, each_pixel=settings.own_size)

    def __call__(self, pixels_NHWC: npt.NDArray[np.uint8]) -> Arrays:
        """Predict at least one image."""
        return self._answers(pixels_NHWC, self.batch_size(pixels_NHWC.shape[1:]))

    def batch_size(self, image_shape: tuple[int, ...], on_cpu: int | None = None) -> int:
        """Images of one forward pass: the settings' number, or `on_cpu`; on a GPU as many as its free memory holds."""
        if self._device.type != "cuda" or self._is_compiled:
            return on_cpu or self._batch_size
        if image_shape not in self._fitting:
            few = np.zeros((on_cpu or self._batch_size, *image_shape), dtype=np.uint8)
            torch.cuda.reset_peak_memory_stats(self._device)
            used = torch.cuda.memory_allocated(self._device)
            self._answers(few, len(few))
            image_bytes = max(1, (torch.cuda.max_memory_allocated(self._device) - used) // len(few))
            free = torch.cuda.mem_get_info(self._device)[0]
            free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            largest = max(1, GPU_BATCH_BYTES // few[0].nbytes)
            # An out-of-memory error in this pass has already left a smaller number.
            fits = min(self._fitting.get(image_shape, largest), int(MEMORY_SHARE * free) // image_bytes)
            self._fitting[image_shape] = max(1, min(fits, largest))
        return self._fitting[image_shape]

    def whole(self, image_HWC: npt.NDArray[np.uint8]) -> Arrays:
        """Predict each pixel of an image of any size: classes and their probabilities (H, W), or pixels (H, W, C)."""
        assert self._grid is not None, "the settings say whether images are predicted at their own sizes"
        answers: Arrays = ()
        for band in bands_of(image_HWC, self._grid):
            shape = band.tiles_MHWC.shape[1:]
            outputs = self._answers(band.tiles_MHWC, self.batch_size(shape, batch_size_for(shape)))
            size = image_HWC.shape[:2]
            answers = answers or tuple(np.empty((*size, *part.shape[3:]), part.dtype) for part in outputs)
            for whole_HW, tiles_MHW in zip(answers, outputs, strict=True):
                put(band, tiles_MHW, whole_HW, self._grid)
        return answers

    @torch.no_grad()
    def _answers(self, pixels_NHWC: npt.NDArray[np.uint8], batch_size: int) -> Arrays:
        set_arithmetic(self._precision, self._device)  # another predictor of this process may compute otherwise
        batches: list[tuple[torch.Tensor, ...]] = []
        start = 0
        while start < len(pixels_NHWC):
            pixels = torch.from_numpy(pixels_NHWC[start : start + batch_size])
            outputs = self._pass(pixels, batch_size)
            if outputs is None:
                batch_size = self._fitting[pixels_NHWC.shape[1:]] = -(-min(batch_size, len(pixels)) // 2)
                torch.cuda.empty_cache()
                continue
            batches.append(outputs)
            start += len(pixels)
        return tuple(torch.cat(column).numpy() for column in zip(*batches, strict=True))

    def _pass(self, pixels: torch.Tensor, batch_size: int) -> tuple[torch.Tensor, ...] | None:
        """Outputs of one forward pass, on the host; None if the device has no memory for so many images."""
        number = len(pixels)
        if self._is_compiled and number < batch_size:  # compiled for one size
            pixels = torch.cat([pixels, pixels.new_zeros((batch_size - number, *pixels.shape[1:]))])
        normalise = self._normalise(tuple(pixels.shape[1:]))
        try:
            if self._device.type == "cuda":
                pixels = pixels.pin_memory().to(self._device, non_blocking=True)
            images = normalise(pixels, channels_last=self._channels_last).to(self._dtype)
            return tuple(output[:number].cpu() for output in self._call(images))
        except RuntimeError as error:
            if number == 1 or self._is_compiled or not is_out_of_memory(error):
                raise
        return None


@lru_cache(maxsize=2)
def predictor(settings: Settings) -> Predictor:
    """The predictor of a worker's process, opened once."""
    return Predictor(settings)


def parity(settings: Settings, pictures: npt.NDArray[np.uint8] | list[npt.NDArray[np.uint8]]) -> Parity:
    """Compare the model as it is executed with the plain one: images (N, H, W, C), or a list of own sizes (H, W, C)."""
    ours, plain = predictor(settings), Predictor(settings, plain=True)
    if isinstance(pictures, np.ndarray):
        return compare_outputs(ours.asked, ours(pictures), plain(pictures))
    answers = [
        tuple(np.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts]) for parts in columns)
        for columns in (zip(*map(model.whole, pictures), strict=True) for model in (ours, plain))
    ]
    return compare_outputs(ours.asked, *answers).model_copy(update={"num_samples": len(pictures)})


def device_kind(device: torch.device) -> str:
    """The kind of this host's CPU, and of a GPU its model: machine code for one GPU does not run on another."""
    if device.type == "cpu":
        return cpu_kind()
    model = re.sub(r"[^\w.]+", "-", torch.cuda.get_device_name(device))
    return "-".join((cpu_kind(), model, *map(str, torch.cuda.get_device_capability(device))))


def _package(settings: Settings, directory: Path) -> Path:
    """The compiled model for this kind of CPU or GPU; the first process compiles it, while others wait.

    A package is a library that is loaded, so only this user can write to its directory. The same holds for the cache of
    torch's compiler, which would otherwise lie in /tmp under a name that anybody can guess.
    """
    directory = private_directory(directory)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory / "compiler"))
    kind = device_kind(torch.device("cuda", 0) if settings.gpu else torch.device("cpu"))
    path = directory / f"{kind}.pt2"
    with (directory / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        eager = Predictor(settings.model_copy(update={"compiled": None}))
        height, width, channels = eager.facts.image_shape
        blank = torch.zeros((settings.batch_size, channels, height, width), dtype=eager._dtype, device=eager._device)
        temporary = path.with_name(f".{uuid4().hex}.pt2")
        with torch.no_grad():
            exported = torch.export.export(eager.module, (set_layout(blank, channels_last=True),))
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(temporary), inductor_configs={"freezing": not settings.gpu}
            )
        temporary.replace(path)
    return path


DTYPES = AUTOCAST_DTYPES | {"64-true": torch.float64}
