"""The table of networks, and test-time augmentation as a part of them, so that evaluation and exports include it.

Networks that classify map images_NCHW to `(logits_NK, targets_NT)`; the second is None without regression targets.
Shapes: N samples, C channels, H height, W width, V views, K classes, T regression targets.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from paceline.conf.model import Model
from paceline.tasks.model.networks import user_network as own
from paceline.tasks.model.networks.convolutional import ConvBlocks, DnCnn, Outputs, SequenceNet, TwoHead, UNet
from paceline.tasks.model.networks.resnet import ResNet, basic, bottleneck
from paceline.tasks.model.networks.whitened import Whitened

_NUM_MIRRORED = 2  # the image and its mirror image


def build_network(model: Model, image_shape: tuple[int, int, int], num_classes: int, num_targets: int) -> nn.Module:
    """Build the network for images of `image_shape` (height, width, channels); errors as in `user_network.build`."""
    network = BUILDERS.get(model.name, own.build)(model, image_shape, num_classes, num_targets)
    return network if model.test_views == 1 else ViewMean(network, model.test_views)


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

    def forward(self, images_NCHW: torch.Tensor) -> Outputs:
        """Return `(logits_NK, None)`."""
        if self.training:
            outputs: Outputs = self.network(images_NCHW)
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
        parts = logits_VNK.split((_NUM_MIRRORED, self.num_views - _NUM_MIRRORED))
        return torch.stack([part.mean(0) for part in parts if len(part)]).mean(0), None


BUILDERS: dict[str, Callable[[Model, tuple[int, int, int], int, int], nn.Module]] = {
    "convblocks": lambda model, shape, classes, _: ConvBlocks(shape[2], classes, model.width, model.depth),
    "twohead": lambda model, shape, classes, targets: TwoHead(shape, classes, targets, model.width),
    "whitened": lambda model, shape, classes, _: Whitened(shape, classes, model.width),
    "unet": lambda model, shape, classes, _: UNet(shape[2], classes, model.width, model.depth),
    "dncnn": lambda model, shape, classes, _: DnCnn(shape[2], model.width, model.depth),
    "resnet18": lambda model, shape, classes, _: ResNet(shape[2], classes, basic, (2, 2, 2, 2)),
    "resnet50": lambda model, shape, classes, _: ResNet(shape[2], classes, bottleneck, (3, 4, 6, 3)),
    "sequence": lambda model, shape, classes, _: SequenceNet(shape, classes, model),
}
"""By name; all others are the user's."""
