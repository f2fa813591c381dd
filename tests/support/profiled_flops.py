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
    events = [event for event in profiled.function_events if not _is_cast(event)]
    known = sum(event.flops for event in events if event.name in PRODUCTS)
    return known + sum(map(_backward_flops, (event for event in events if event.name == BACKWARD)))


def _is_cast(event):
    """Whether an operation is autocast's, which casts the inputs and calls the operation of the same name."""
    return any(child.name == event.name for child in event.cpu_children)


def _backward_flops(event):
    """As many as forward, for each of the gradients of input and weight that is computed."""
    gradient, _, weight, *_ = event.input_shapes
    *_, is_computed = event.concrete_inputs
    return 2 * prod(gradient) * prod(weight[1:]) * sum(is_computed[:2])
