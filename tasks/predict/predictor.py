"""A model as prediction executes it: batch norm folded, reduced precision, channels last, perhaps compiled ahead.

Shapes: N samples, H height, W width, C channels, M tiles.
"""

import fcntl
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch

from paceline.tasks.cluster.hardware import cpu_kind
from paceline.tasks.data.loading.batch import Normalise, set_layout
from paceline.tasks.files import private_directory
from paceline.tasks.model.fuse_batch_norm import fold_batch_norm
from paceline.tasks.model.load import load_trained_model
from paceline.tasks.model.transfer import reach_and_stride
from paceline.tasks.predict.job import Parity, Settings, batch_size_for
from paceline.tasks.predict.outputs import Arrays, asked_of, compare_outputs, with_head
from paceline.tasks.predict.tiles import bands_of, grid_for, put
from paceline.tasks.train.step.precision import AUTOCAST_DTYPES, prepare_network

NUM_SHAPES = 8  # cached shapes of images, for their normalisation constants


class Predictor:
    """Predicts uint8 images; with `plain` as the model was trained: float32, eager, contiguous, nothing folded."""

    def __init__(self, settings: Settings, *, plain: bool = False) -> None:
        torch.set_num_threads(settings.num_threads)
        network, self.facts = load_trained_model(Path(settings.model_directory), settings.model_digest)
        self.asked = asked_of(self.facts, settings.layer)
        self._device = torch.device("cuda", 0) if settings.gpu else torch.device("cpu")
        self._channels_last = not plain
        self._dtype = torch.float32 if plain else DTYPES.get(settings.precision, torch.float32)
        self._normalise = lru_cache(maxsize=NUM_SHAPES)(
            lambda shape: Normalise(self.facts.mean, self.facts.std, shape).to(self._device)
        )
        self._batch_size = settings.batch_size
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
        return self._answers(pixels_NHWC, self._batch_size)

    def whole(self, image_HWC: npt.NDArray[np.uint8]) -> Arrays:
        """Predict each pixel of an image of any size: classes and their probabilities (H, W), or pixels (H, W, C)."""
        assert self._grid is not None, "the settings say whether images are predicted at their own sizes"
        answers: Arrays = ()
        for band in bands_of(image_HWC, self._grid):
            outputs = self._answers(band.tiles_MHWC, batch_size_for(band.tiles_MHWC.shape[1:]))
            answers = answers or tuple(
                np.empty((*image_HWC.shape[:2], *part.shape[3:]), part.dtype) for part in outputs
            )
            for whole_HW, tiles_MHW in zip(answers, outputs, strict=True):
                put(band, tiles_MHW, whole_HW, self._grid)
        return answers

    @torch.no_grad()
    def _answers(self, pixels_NHWC: npt.NDArray[np.uint8], batch_size: int) -> Arrays:
        batches: list[tuple[torch.Tensor, ...]] = []
        normalise = self._normalise(pixels_NHWC.shape[1:])
        for start in range(0, len(pixels_NHWC), batch_size):
            pixels = torch.from_numpy(pixels_NHWC[start : start + batch_size])
            number = len(pixels)
            if self._is_compiled and number < batch_size:  # compiled for one size
                blank = pixels.new_zeros((batch_size - number, *pixels.shape[1:]))
                pixels = torch.cat([pixels, blank])
            images = normalise(pixels.to(self._device), channels_last=self._channels_last).to(self._dtype)
            batches.append(tuple(output[:number].cpu() for output in self._call(images)))
        return tuple(torch.cat(column).numpy() for column in zip(*batches, strict=True))


@lru_cache(maxsize=2)
def predictor(settings: Settings) -> Predictor:
    """The predictor of a worker's process, opened once."""
    return Predictor(settings)


def parity(settings: Settings, pixels_NHWC: npt.NDArray[np.uint8]) -> Parity:
    """The model as it is executed, against the plain one."""
    ours, plain = predictor(settings), Predictor(settings, plain=True)
    return compare_outputs(ours.asked, ours(pixels_NHWC), plain(pixels_NHWC))


def parity_of_whole(settings: Settings, pictures: Sequence[npt.NDArray[np.uint8]]) -> Parity:
    """The same of images (H, W, C) at their own sizes, pixel by pixel."""
    ours, plain = predictor(settings), Predictor(settings, plain=True)
    answers = [
        tuple(np.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts]) for parts in columns)
        for columns in (zip(*map(model.whole, pictures), strict=True) for model in (ours, plain))
    ]
    return compare_outputs(ours.asked, *answers).model_copy(update={"num_samples": len(pictures)})


def _package(settings: Settings, directory: Path) -> Path:
    """The compiled model for this kind of CPU; the first process compiles it, while others wait.

    A package is a library that is loaded, so only this user can write to its directory. The same holds for the cache of
    torch's compiler, which would otherwise lie in /tmp under a name that anybody can guess.
    """
    directory = private_directory(directory)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory / "compiler"))
    path = directory / f"{cpu_kind()}.pt2"
    with (directory / f"{cpu_kind()}.lock").open("w") as lock:
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
