"""Networks with an output for every pixel.

Height and width of their images are multiples of `stride`, and `reach` is their receptive field, both in pixels: so
images of any size can be cut into tiles for them. Shapes: N samples, C channels, H height, W width, K classes.
"""

import torch
from torch import nn

from paceline.tasks.model.networks.convolutional import Outputs, convolutions


class UNet(nn.Module):
    """Halves the image `depth` times and doubles it again, with the features of each size handed across.

    Source: Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015);
    with batch norm, padding in place of cropping, and resizing before a convolution in place of a transposed one, which
    leaves checkerboards (Odena, Dumoulin and Olah, "Deconvolution and Checkerboard Artifacts", 2016).
    """

    unordered = ("up",)
    """Parts whose layers do not run in the order in which they are listed."""

    def __init__(self, channels: int, num_classes: int, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        inputs = [channels, *widths]
        self.down = nn.ModuleList(_double(before, after) for before, after in zip(inputs, widths, strict=False))
        self.halve = nn.MaxPool2d(2)
        self.enlarge = nn.Upsample(scale_factor=2, mode="nearest")
        self.up = nn.ModuleList(_double(widths[level] + widths[level + 1], widths[level]) for level in range(depth))
        self.classify = nn.Conv2d(width, num_classes, 1)
        self.stride = 2**depth
        # Of 4 convolutions at each size but the smallest, which has 2, of halving and of doubling: less than this.
        self.reach = 8 * self.stride

    def forward(self, images_NCHW: torch.Tensor) -> Outputs:
        """Return `(logits_NKHW, None)`."""
        features = images_NCHW
        across = []
        for level, block in enumerate(self.down):
            features = block(features if level == 0 else self.halve(features))
            across.append(features)
        for level in reversed(range(len(self.up))):
            features = self.up[level](torch.cat([across[level], self.enlarge(features)], dim=1))
        return self.classify(features), None


def _double(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(*convolutions(before, after, after))


class DnCnn(nn.Module):
    """Predicts the noise of an image, and takes it off.

    Source: Zhang et al., "Beyond a Gaussian Denoiser: Residual Learning of Deep CNN for Image Denoising" (2017), whose
    network has depth 17 and width 64.
    """

    def __init__(self, channels: int, width: int, depth: int) -> None:
        super().__init__()
        first, inner = nn.Conv2d(channels, width, 3, padding=1), convolutions(*[width] * (depth - 1))
        self.noise = nn.Sequential(first, nn.ReLU(), *inner, nn.Conv2d(width, channels, 3, padding=1))
        self.stride, self.reach = 1, depth

    def forward(self, images_NCHW: torch.Tensor) -> Outputs:
        """Return `(images_NCHW without noise, None)`."""
        return images_NCHW - self.noise(images_NCHW), None
