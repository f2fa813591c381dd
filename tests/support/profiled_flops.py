"""Floating-point operations of a training step as torch's profiler sees them: an independent count.

The profiler gives the operations of products and of the forward pass of convolutions. It does not know those of the
backward pass of a convolution, but records its shapes and which gradients it computes.
"""

from math import prod

from torch.autograd.profiler import profile

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::conv2d"}
BACKWARD = "aten::convolution_backward"


def profiled_flops(step):
    """Operations of calling `step`."""
    with profile(with_flops=True, record_shapes=True) as profiled:
        step()
    events = profiled.function_events
    known = sum(event.flops for event in events if event.name in PRODUCTS)
    return known + sum(map(_backward_flops, (event for event in events if event.name == BACKWARD)))


def _backward_flops(event):
    """As many as forward, for each of the gradients of input and weight that is computed."""
    gradient, _, weight, *_ = event.input_shapes
    *_, is_computed = event.concrete_inputs
    return 2 * prod(gradient) * prod(weight[1:]) * sum(is_computed[:2])
