"""Networks of plain convolutions, for images, clips and pixels, and the blocks that several networks have.

A clip is an image whose channels are the colours of its frames, one frame after the other (infra/decisions/0021).
Networks with an output for every pixel have `stride`, of which height and width are multiples, and `reach`, their
receptive field, both in pixels: so images of any size can be cut into tiles for them.
Shapes: N samples, T frames, M = N * T, C channels, H height, W width, D features, K classes.
"""

from itertools import pairwise

import torch
from torch import fx, nn
from torch.nn import functional

from paceline.conf.data import NUM_COLOURS
from paceline.conf.model import Model

Outputs = tuple[torch.Tensor, torch.Tensor | None]
GRID = 4  # features of clips are averaged over so many fields each way, not over the frame: what moves is somewhere


def convolutions(*widths: int) -> list[nn.Module]:
    """3x3 convolutions with batch norm and ReLU, from each number of channels to the next one."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return layers


def conv_blocks(channels: int, width: int, depth: int) -> tuple[nn.Sequential, int]:
    """Three blocks of `depth` convolutions, a max-pool between them, and how many channels they give.

    Each block has twice the filters of the one before, the first has `width`.
    """
    blocks = convolutions(channels, *[width] * depth)
    for filters in (2 * width, 4 * width):
        blocks += [nn.MaxPool2d(2), *convolutions(filters // 2, *[filters] * depth)]
    return nn.Sequential(*blocks), 4 * width


def every_nth(features_NCHW: torch.Tensor, stride: int) -> torch.Tensor:
    """Every `stride`-th row and column, for a 1x1 convolution of stride 1 after it.

    A strided 1x1 convolution is the same, but oneDNN's weight gradient of it writes past its buffers with two threads
    and few channels (SIGSEGV, heap corruption; torch 2.13 on Zen 5, 2026-11-21). They are taken as means of one pixel
    each and not as a slice, for the gradient of a slice is never channels last (see `keep_format`).
    """
    return features_NCHW if stride == 1 else functional.avg_pool2d(features_NCHW, 1, stride)


def keep_format(features_NCHW: torch.Tensor) -> torch.Tensor:
    """Return the features, whose gradient will be channels last where they are.

    Flattening or averaging gives a contiguous gradient, and all the operations before it would go through memory in two
    orders at once: a ReLU then takes up to nine times as long (infra/LOG.md, 2026-11-23). A compiled network orders its
    memory itself.
    """
    if isinstance(features_NCHW, fx.Proxy):
        # Traced for a process without Paceline: the gradient of a mean of one pixel.
        return functional.avg_pool2d(features_NCHW, 1)
    if features_NCHW.requires_grad and not torch.compiler.is_compiling() and not features_NCHW.is_contiguous():
        features_NCHW.register_hook(lambda gradient_NCHW: gradient_NCHW.contiguous(memory_format=torch.channels_last))
    return features_NCHW


class ConvBlocks(nn.Module):
    """Three blocks of `depth` 3x3 convolutions with batch norm and ReLU, average pool, one dense layer.

    Source: the network of MathWorks' "Train Network Using Automatic Multi-GPU Support" (width 32, depth 4).
    """

    def __init__(self, channels: int, num_classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.features, channels = conv_blocks(channels, width, depth)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(channels, num_classes)

    def forward(self, images_NCHW: torch.Tensor) -> Outputs:
        """Return `(logits_NK, None)`."""
        return self.classify(self.pool(keep_format(self.features(images_NCHW))).flatten(1)), None


class TwoHead(nn.Module):
    """A small residual network with a class head and a regression head.

    Source: the model of MathWorks' "Evaluate Performance of Accelerated Deep Learning Function" (width 16).
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, num_targets: int, filters: int) -> None:
        super().__init__()
        height, width, channels = image_shape
        wide = 2 * filters
        stem = nn.Conv2d(channels, filters, 5, padding=2, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(filters), nn.ReLU())
        halve = nn.Conv2d(filters, wide, 3, stride=2, padding=1, bias=False)
        again = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.branch = nn.Sequential(halve, nn.BatchNorm2d(wide), nn.ReLU(), again, nn.BatchNorm2d(wide))
        self.skip = nn.Sequential(nn.Conv2d(filters, wide, 1, bias=False), nn.BatchNorm2d(wide))
        num_features = wide * ((height + 1) // 2) * ((width + 1) // 2)
        self.classify = nn.Linear(num_features, num_classes)
        self.regress = nn.Linear(num_features, num_targets)

    def forward(self, images_NCHW: torch.Tensor) -> Outputs:
        """Return `(logits_NK, targets_NT)`."""
        stem = self.stem(images_NCHW)
        features = keep_format(torch.relu(self.branch(stem) + self.skip(every_nth(stem, 2)))).flatten(1)
        return self.classify(features), self.regress(features)


class SequenceNet(nn.Module):
    """Classifies clips whose channels are the colours of all frames."""

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, model: Model) -> None:
        super().__init__()
        self.num_frames = image_shape[2] // NUM_COLOURS
        self.features, channels = conv_blocks(NUM_COLOURS, model.width, model.depth)
        self.pool = nn.AdaptiveAvgPool2d(GRID)
        # Normalised: where something is makes a small difference to what is everywhere, and it is all that moves.
        embed = nn.Linear(channels * GRID * GRID, channels, bias=False)
        self.embed = nn.Sequential(embed, nn.BatchNorm1d(channels), nn.ReLU())
        self.over_time = Recurrent(channels)
        self.classify = nn.Linear(channels, num_classes)

    def forward(self, images_NCHW: torch.Tensor) -> Outputs:
        """Return `(logits_NK, None)`."""
        frames_MCHW = images_NCHW.unflatten(1, (self.num_frames, NUM_COLOURS)).flatten(0, 1)
        embedded_MD = self.embed(self.pool(keep_format(self.features(frames_MCHW))).flatten(1))
        return self.classify(self.over_time(embedded_MD.unflatten(0, (-1, self.num_frames)))), None


class Recurrent(nn.Module):
    """Gated recurrent units over the frames; the prediction uses their last state.

    In plain operations and not as `nn.GRU`: that one is not compiled, and under autocast on CPUs takes no bfloat16.

    Source: Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder" (2014), with the reset gate behind
    the matrix as cuDNN and `nn.GRU` have it.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.see = nn.Linear(size, 3 * size)
        self.remember = nn.Linear(size, 3 * size)

    def forward(self, features_NTD: torch.Tensor) -> torch.Tensor:
        """The state (N, D) after the last frame."""
        seen_NTG = self.see(features_NTD)
        state_ND = torch.zeros_like(seen_NTG[:, 0].chunk(3, dim=1)[0])
        for seen_NG in seen_NTG.unbind(1):
            reset_ND, keep_ND, new_ND = seen_NG.chunk(3, dim=1)
            from_reset_ND, from_keep_ND, from_new_ND = self.remember(state_ND).chunk(3, dim=1)
            proposed_ND = torch.tanh(new_ND + torch.sigmoid(reset_ND + from_reset_ND) * from_new_ND)
            state_ND = torch.lerp(proposed_ND, state_ND, torch.sigmoid(keep_ND + from_keep_ND))
        return state_ND


class UNet(nn.Module):
    """Halves the image `depth` times and doubles it again, with the features of each size handed across.

    Source: Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015);
    with batch norm, padding in place of cropping, and resizing before a convolution in place of a transposed one, which
    leaves checkerboards (Odena, Dumoulin and Olah, "Deconvolution and Checkerboard Artifacts", 2016).
    """

    unordered = ("up",)  # parts whose layers do not run in the order in which they are listed

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
