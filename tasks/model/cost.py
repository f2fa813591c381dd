"""The cost of a network as a record. Imports no torch: commands that only read figures start faster."""

from paceline.tasks.records.record import Record


class Cost(Record):
    """Cost of one sample, counted and not timed: convolutions and matrix products only."""

    forward_flops: float
    """Floating-point operations, two for each multiplication with its addition."""
    training_flops: float
    """Forward and backward."""
    num_parameters: int
    image_bytes: int
    """Of a sample as it lies in memory, one byte a value."""
