"""Cost of a network in training, counted and not timed."""

from paceline.tasks.records.record import Record


class Cost(Record):
    """Cost of one sample: what grows with the samples of a batch. Convolutions and matrix products only.

    Not counted: everything else of the network, the loss, the optimizer, and operations that are repeated to save
    memory.
    """

    forward_flops: float  # floating-point operations, two for each multiplication with its addition
    training_flops: float  # forward and backward
    num_parameters: int
    num_trained: int = 0  # of them, those with a gradient
    saved_values: float = 0.0  # floating-point values stored for the backward pass, without parameters and buffers
    saved_bytes: float = 0.0  # other values that the forward pass stores, such as indices of a max-pool
    image_bytes: int = 0  # of a sample as it lies in memory, one byte a value; 0 where that is not known
