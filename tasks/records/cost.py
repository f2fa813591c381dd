"""Cost of a network in training, counted and not timed."""

from paceline.tasks.records.record import Record


class Cost(Record):
    """Cost of one sample: what grows with the samples of a batch. Convolutions and matrix products only.

    Not counted: everything else of the network, the loss, the optimizer, and operations that are repeated to save
    memory.
    """

    forward_flops: float
    """Floating-point operations, two for each multiplication with its addition."""
    training_flops: float
    """Forward and backward."""
    num_parameters: int
    num_trained: int = 0
    """Of them, those with a gradient."""
    saved_values: float = 0.0
    """Floating-point values that the forward pass stores for the backward pass, without parameters and buffers."""
    saved_bytes: float = 0.0
    """Other values that it stores, such as indices of a max-pool."""
    image_bytes: int
    """Of a sample as it lies in memory, one byte a value."""
