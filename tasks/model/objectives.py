"""Objectives and measures of quality: classes of images, classes of pixels, images without noise.

A task knows what of a batch the network sees, what the loss is, and a few numbers for each sample that add up to a
score over any split and any number of ranks. Shapes: N samples, C channels, H height, W width, K classes, S statistics.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch.nn import functional

from paceline.conf.config import Config
from paceline.conf.recipe import Recipe
from paceline.tasks.model.batch import Batch
from paceline.tasks.model.noise import gaussian
from paceline.tasks.plugins import require_plugin
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.training import ScoreName
from paceline.tasks.scores import mean_iou

Outputs = tuple[torch.Tensor, torch.Tensor | None]
# The weight of the recipe's source is for degrees. With 0.1 for radians the angle hardly counts: 16.5 degrees RMS
# instead of 2.9 after 20 epochs of the twohead preset (accuracy 0.985 instead of 0.973; 2026-11-21).
DEGREES_PER_RADIAN = 180.0 / math.pi
NO_CLASS = -1
FULL_SCALE = 255.0


class Task(ABC):
    """Interface of all objectives."""

    score_name: ScoreName  # name of the score, which is from 0 to 1, as metrics have it
    draws = False  # whether the objective adds random noise to the images
    num_statistics: int  # S
    num_kept: int  # number of stored values per sample

    def inputs(self, batch: Batch) -> torch.Tensor:
        """Input of the network from a batch (N, C, H, W)."""
        return batch.images_NCHW

    @abstractmethod
    def loss(self, outputs: Outputs, batch: Batch, recipe: Recipe) -> torch.Tensor:
        """Scalar: the mean over the samples."""

    @abstractmethod
    def statistics(self, outputs: Outputs, batch: Batch, inputs_NCHW: torch.Tensor) -> torch.Tensor:
        """For each sample, float64 (N, S): first its loss, then what the score is made of."""

    def score(self, totals_S: Sequence[float], num_samples: float) -> float:
        """Score from the statistics' sums over samples; by default the mean of the first one after the loss."""
        return totals_S[1] / num_samples

    def select_outputs(self, outputs: Outputs, batch: Batch, inputs_NCHW: torch.Tensor) -> torch.Tensor:
        """Outputs that the evaluation of a test split needs; statistics where the outputs are too large to store."""
        return self.statistics(outputs, batch, inputs_NCHW)


class Classification(Task):
    """The class of an image, and regression targets where the network has them. The score is the accuracy."""

    score_name: ScoreName = "accuracy"
    num_statistics = 2

    def __init__(self, num_classes: int) -> None:
        self.num_kept = num_classes

    def loss(self, outputs: Outputs, batch: Batch, recipe: Recipe) -> torch.Tensor:
        """Cross-entropy, of a mixture that with both classes by their shares; the targets' weighted squared error."""
        logits_NK, targets_NT = outputs
        smoothing, own_N = recipe.label_smoothing, batch.mix_weights_N
        if own_N is None or batch.mixed_labels_N is None:
            loss = functional.cross_entropy(logits_NK, batch.labels_N, label_smoothing=smoothing)
        else:
            own_loss, mixed_loss = (
                functional.cross_entropy(logits_NK, classes_N, label_smoothing=smoothing, reduction="none")
                for classes_N in (batch.labels_N, batch.mixed_labels_N)
            )
            loss = (own_N * own_loss + (1 - own_N) * mixed_loss).mean()
        if targets_NT is not None and batch.targets_NT is not None:
            squared = functional.mse_loss(targets_NT, batch.targets_NT.to(targets_NT.dtype))
            loss = loss + recipe.angle_weight * DEGREES_PER_RADIAN**2 * squared
        return loss

    def statistics(self, outputs: Outputs, batch: Batch, inputs_NCHW: torch.Tensor) -> torch.Tensor:
        """Cross-entropy, and whether the class is right."""
        logits_NK, _ = outputs
        loss_N = functional.cross_entropy(logits_NK, batch.labels_N, reduction="none")
        return torch.stack([loss_N.double(), (logits_NK.argmax(1) == batch.labels_N).double()], dim=1)

    def select_outputs(self, outputs: Outputs, batch: Batch, inputs_NCHW: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return outputs[0]


class Segmentation(Task):
    """The class of each pixel. The mask is the batch's last channel, as prepared sets have it."""

    score_name: ScoreName = "mean_iou"

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self.num_statistics = self.num_kept = 1 + 3 * num_classes

    def inputs(self, batch: Batch) -> torch.Tensor:
        """The picture."""
        return batch.images_NCHW[:, :-1]

    def loss(self, outputs: Outputs, batch: Batch, recipe: Recipe) -> torch.Tensor:
        """Cross-entropy: over the pixels of each sample that have a class, then over the samples."""
        return self._losses(outputs[0], self._classes(batch), recipe.label_smoothing).mean()

    def _losses(self, logits_NKHW: torch.Tensor, classes_NHW: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        losses_NHW = functional.cross_entropy(
            logits_NKHW, classes_NHW, ignore_index=NO_CLASS, label_smoothing=smoothing, reduction="none"
        )
        num_N = (classes_NHW != NO_CLASS).sum(dim=(1, 2)).clamp(min=1)
        return losses_NHW.sum(dim=(1, 2)) / num_N

    def _classes(self, batch: Batch) -> torch.Tensor:
        return batch.images_NCHW[:, -1].round().long() - 1

    def statistics(self, outputs: Outputs, batch: Batch, inputs_NCHW: torch.Tensor) -> torch.Tensor:
        """Cross-entropy; then the correct, predicted and actual pixels of each class."""
        logits_NKHW, classes_NHW = outputs[0], self._classes(batch)
        known_NHW, predicted_NHW = classes_NHW != NO_CLASS, logits_NKHW.argmax(1)
        right_NHW = known_NHW & (predicted_NHW == classes_NHW)
        counts = (
            functional.one_hot(kinds.clamp(min=0), self._num_classes).mul(mask[..., None]).sum(dim=(1, 2)).double()
            for kinds, mask in ((classes_NHW, right_NHW), (predicted_NHW, known_NHW), (classes_NHW, known_NHW))
        )
        return torch.cat([self._losses(logits_NKHW, classes_NHW).double()[:, None], *counts], dim=1)

    def score(self, totals_S: Sequence[float], num_samples: float) -> float:
        """Mean intersection over union of the classes that are predicted or present."""
        return mean_iou(totals_S[1:])

    def select_example(self, outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicted and actual classes (N, H, W), from 1; 0 for none."""
        return outputs[0].argmax(1) + 1, batch.images_NCHW[:, -1]


class Denoising(Task):
    """The image without the noise that is added to it. The score is the mean structural similarity.

    `noise` is its standard deviation, of 255; `std_C` are the deviations of the channels, by which images are divided,
    in units of full scale; `seed` is that of the noise.
    """

    score_name: ScoreName = "ssim"
    draws = True
    num_statistics = num_kept = 4

    def __init__(self, noise: float, std_C: Sequence[float], seed: int) -> None:
        self._noise, self._seed = noise / FULL_SCALE, seed
        self._std_C = [std or 1.0 for std in std_C]

    def inputs(self, batch: Batch) -> torch.Tensor:
        """With noise."""
        images_NCHW = batch.images_NCHW
        assert batch.noise_seeds_N is not None
        noise_NCHW = gaussian(batch.noise_seeds_N, tuple(images_NCHW.shape[1:]), self._seed).to(images_NCHW.dtype)
        return images_NCHW + noise_NCHW * (self._noise / self._scale(images_NCHW))

    def _scale(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        """Made where the images are: a copy from the host is not allowed while a CUDA graph is recorded."""
        return torch.cat([images_NCHW.new_full((1, 1, 1, 1), std) for std in self._std_C], dim=1)

    def loss(self, outputs: Outputs, batch: Batch, recipe: Recipe) -> torch.Tensor:
        """Mean squared error of the pixels, where images are divided by their channels' deviation."""
        return functional.mse_loss(outputs[0], batch.images_NCHW.to(outputs[0].dtype))

    def statistics(self, outputs: Outputs, batch: Batch, inputs_NCHW: torch.Tensor) -> torch.Tensor:
        """Mean squared error as in the loss; structural similarity; PSNR with and without the network, in dB."""
        from torchmetrics.functional.image import structural_similarity_index_measure  # half a second

        clean_NCHW = batch.images_NCHW.float()
        found_NCHW, noisy_NCHW = outputs[0].float(), inputs_NCHW.float()
        scale = self._scale(clean_NCHW)
        loss_N = (found_NCHW - clean_NCHW).square().mean(dim=(1, 2, 3))
        psnr, noisy_psnr = (
            -10.0 * torch.log10(((images_NCHW - clean_NCHW) * scale).square().mean(dim=(1, 2, 3)).clamp(min=1e-10))
            for images_NCHW in (found_NCHW, noisy_NCHW)
        )
        similar_N = structural_similarity_index_measure(
            found_NCHW * scale, clean_NCHW * scale, data_range=1.0, reduction="none"
        )
        assert isinstance(similar_N, torch.Tensor)
        return torch.stack([loss_N, similar_N.reshape(-1), psnr, noisy_psnr], dim=1).double()

    def select_example(self, outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicted and clean images (N, C, H, W), normalised."""
        return outputs[0], batch.images_NCHW


PixelTask = Segmentation | Denoising  # objectives with example pictures (`select_example`)


def task_of(config: Config, prepared: PreparedSet) -> Task:
    """The task of a configuration on a set; InputError if the package of the user's model is not installed here."""
    with require_plugin():
        kind = config.model.task
    if kind == "segment":
        return Segmentation(len(prepared.class_names))
    if kind == "denoise":
        return Denoising(config.recipe.noise, prepared.std, config.seed)
    return Classification(len(prepared.class_names))
