"""Cost of a network, counted on the network itself: independent of the machine."""

from math import prod

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.tasks.model.cost import Cost

NUM_SAMPLES = 2  # fewest that a batch norm can train on


def cost_of(network: nn.Module, image_shape: tuple[int, int, int]) -> Cost:
    """Count what one sample needs, forward and in training; the network's statistics change."""
    height, width, channels = image_shape
    images_NCHW = torch.zeros(NUM_SAMPLES, channels, height, width)
    with torch.no_grad(), FlopCounterMode(display=False) as forward:
        network.eval()(images_NCHW)
    with FlopCounterMode(display=False) as training:
        outputs = [output for output in network.train()(images_NCHW) if output is not None]
        torch.stack([output.float().sum() for output in outputs]).sum().backward()
    return Cost(
        forward_flops=forward.get_total_flops() / NUM_SAMPLES,
        training_flops=training.get_total_flops() / NUM_SAMPLES,
        num_parameters=sum(weight.numel() for weight in network.parameters()),
        image_bytes=prod(image_shape),
    )
