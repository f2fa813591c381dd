"""What a GPU could do at the very most, by its data sheet: an upper bound, and no forecast.

The roofline of Williams, Waterman and Patterson (2009): a sample needs its counted operations, at the dense 16-bit peak
of the tensor cores, and its bytes, at the bandwidth of the memory; whichever takes longer bounds the rate. Left out is
what makes real programs slower: activations, other layers, launches, the way from the host. So a device reaches less,
small networks on small images by orders of magnitude.
"""

from __future__ import annotations

from tasks.records import Cost, Record

TERA, GIGA = 1e12, 1e9
WEIGHT_BYTES = 4
TRAFFIC_OF_TRAINING = 2
"""Times that each weight passes the memory in a step at the least: it is read, and written again."""


class DataSheet(Record):
    """A device as its maker describes it."""

    name: str
    flops: float
    """Dense, 16-bit, tensor cores; per second."""
    bytes_per_second: float
    """Of its memory."""
    source: str


SHEETS = {
    sheet.name: sheet
    for sheet in (
        DataSheet(name="T4", flops=65 * TERA, bytes_per_second=320 * GIGA, source="NVIDIA T4 data sheet, 2019"),
        DataSheet(name="L4", flops=121 * TERA, bytes_per_second=300 * GIGA, source="NVIDIA L4 data sheet, 2023"),
        DataSheet(
            name="A100", flops=312 * TERA, bytes_per_second=2039 * GIGA, source="NVIDIA A100 80GB SXM data sheet, 2021"
        ),
        DataSheet(
            name="H100", flops=989.5 * TERA, bytes_per_second=3350 * GIGA, source="NVIDIA H100 SXM data sheet, 2023"
        ),
        DataSheet(
            name="H200", flops=989.5 * TERA, bytes_per_second=4800 * GIGA, source="NVIDIA H200 SXM data sheet, 2024"
        ),
    )
}
"""By the names that people use. Where a sheet tells the peak with sparsity alone, half of it."""


def most_predicted(sheet: DataSheet, cost: Cost) -> float:
    """Samples per second that a device cannot exceed in prediction: each image is read once, weights stay."""
    return min(sheet.flops / cost.forward_flops, sheet.bytes_per_second / cost.image_bytes)


def most_trained(sheet: DataSheet, cost: Cost, batch_size: int) -> float:
    """Samples per second that a device cannot exceed in training.

    Args:
        sheet: of the device.
        cost: of the network.
        batch_size: samples of a step, over which the weights' traffic is shared.
    """
    weights = TRAFFIC_OF_TRAINING * WEIGHT_BYTES * cost.num_parameters / batch_size
    return min(sheet.flops / cost.training_flops, sheet.bytes_per_second / (cost.image_bytes + weights))
