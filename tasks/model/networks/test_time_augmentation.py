"""Test-time augmentation as a part of the network, so that evaluation and exports include it.

Shapes: N samples, C channels, H height, W width, V views, K classes.
"""

import torch
from torch import nn
from torch.nn import functional

_NUM_MIRRORED = 2  # the image and its mirror image


class ViewMean(nn.Module):
    """In training the network itself; in evaluation the mean of its logits over views of each image.

    The shifted views count as much, all together, as those that are not. The network has no regression targets, which a
    mirror image may change.

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks" (2012), section 4.1;
    these views and their weights: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024).
    """

    def __init__(self, network: nn.Module, num_views: int) -> None:
        super().__init__()
        self.network = network
        self.num_views = num_views

    def forward(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `(logits_NK, None)`."""
        if self.training:
            outputs: tuple[torch.Tensor, torch.Tensor | None] = self.network(images_NCHW)
            return outputs
        # One pass over all views: one launch of each kernel, and one copy of the network where it is exported.
        height, width = images_NCHW.shape[2:]
        views = [images_NCHW]  # those that are not shifted first, each followed by its mirror image
        if self.num_views > _NUM_MIRRORED:
            padded = functional.pad(images_NCHW, (1, 1, 1, 1), mode="reflect")
            views += [padded[:, :, :height, :width], padded[:, :, 2:, 2:]]
        logits, _ = self.network(torch.cat([view for image in views for view in (image, image.flip(3))]))
        exact = torch.promote_types(logits.dtype, torch.float32)
        logits_VNK = logits.to(exact).unflatten(0, (self.num_views, -1))
        means = [
            part.mean(0) for part in logits_VNK.split((_NUM_MIRRORED, self.num_views - _NUM_MIRRORED)) if len(part)
        ]
        return torch.stack(means).mean(0), None
