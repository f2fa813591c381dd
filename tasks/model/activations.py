"""The output of a layer in place of the network's. Shapes: N samples, C channels, H height, W width, D values."""

import threading

import torch
from torch import nn

from paceline.tasks.model.transfer import core_of


def layer_sizes(network: nn.Module, image_shape: tuple[int, int, int]) -> dict[str, int]:
    """Number of values of each layer for an image of `image_shape` (height, width, channels), by name.

    Layers that give no tensor with a row for each image are left out, such as lists of layers. Tried on two black
    images, in evaluation, which changes no statistics.
    """
    core, sizes = core_of(network).eval(), dict[nn.Module, int]()
    height, width, channels = image_shape
    images_NCHW = torch.zeros(2, channels, height, width)

    def take(layer: nn.Module, inputs: object, output: object) -> None:
        sizes.pop(layer, None)  # of a layer that is used more than once the last time
        if isinstance(output, torch.Tensor) and output.shape[:1] == images_NCHW.shape[:1]:
            sizes[layer] = output[0].numel()

    layers = {name: layer for name, layer in core.named_modules() if name}
    hooks = [layer.register_forward_hook(take) for layer in layers.values()]
    with torch.no_grad():
        core(images_NCHW)
    for hook in hooks:
        hook.remove()
    return {name: sizes[layer] for name, layer in layers.items() if layer in sizes}


class Activations(nn.Module):
    """Images to the output of a layer (a name of `layer_sizes`), flattened (N, D), float32.

    A mean over views is left out; of a layer that is used more than once the last output counts. Batch norm must not be
    folded, or a convolution would give the output of its norm.
    """

    def __init__(self, network: nn.Module, layer: str) -> None:
        super().__init__()
        self.core = core_of(network)
        self._found: dict[int, torch.Tensor] = {}  # by thread: those of a worker share its model
        self.core.get_submodule(layer).register_forward_hook(self._take)

    def _take(self, layer: nn.Module, inputs: object, output: torch.Tensor) -> None:
        self._found[threading.get_ident()] = output.clone()  # the next layer may work in place

    def forward(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor]:
        """Return `(values_ND,)`."""
        self.core(images_NCHW)
        return (self._found.pop(threading.get_ident()).flatten(1).float(),)
