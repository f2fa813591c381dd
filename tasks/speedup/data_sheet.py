"""GPUs as their maker describes them, and the bounds that follow for a network."""

import re

from paceline.tasks.records.cost import Cost
from paceline.tasks.records.record import Record

WEIGHT_BYTES = 4
TRAFFIC_OF_TRAINING = 2  # times that each weight passes the memory in a step at the least: it is read, and written


class DataSheet(Record):
    """A device as its maker describes it."""

    name: str
    flops: float  # dense, 16-bit, tensor cores; per second
    bytes_per_second: float  # of its memory
    source: str
    pattern: str  # regular expression of the names that its driver gives; a part of a GPU (MIG) has another name
    peaks: dict[str, float]  # FLOP/s, dense, by precision; a missing one is not in the sheet


PRECISIONS = ("16-mixed", "bf16-mixed", "tf32", "32-true", "64-true")
# TFLOP/s in the order of `PRECISIONS`; 0 where a precision is not in the sheet.
AMPERE, HOPPER = (312, 312, 156, 19.5, 19.5), (989.5, 989.5, 494.7, 67, 67)
ADA = (165.2, 165.2, 82.6, 82.6, 0)  # GeForce RTX 4090
SHEETS = {
    name: DataSheet(
        name=name,
        flops=teraflops[0] * 1e12,
        bytes_per_second=gigabytes * 1e9,
        source=f"NVIDIA {source}",
        pattern=pattern,
        peaks={precision: peak * 1e12 for precision, peak in zip(PRECISIONS, teraflops, strict=True) if peak},
    )
    for name, pattern, gigabytes, teraflops, source in (
        ("T4", "(Tesla|NVIDIA) T4", 320, (65, 0, 0, 8.1, 0), "T4 data sheet, 2019"),
        ("V100", "(Tesla|NVIDIA) V100-SXM2-.*", 900, (125, 0, 0, 15.7, 7.8), "V100 data sheet, 2020"),
        ("L4", "NVIDIA L4", 300, (121, 121, 60, 30.3, 0), "L4 data sheet, 2023"),
        ("L40S", "NVIDIA L40S", 864, (362, 362, 183, 91.6, 0), "L40S data sheet, 2023"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090", 1008, ADA, "Ada GPU architecture, 2022; sums in fp32"),
        ("A100", "NVIDIA A100(-SXM|-PCIE|-PCIe| )[^M]*", 2039, AMPERE, "A100 80GB SXM data sheet, 2021"),
        ("H100 PCIe", "NVIDIA H100 PCIe", 2000, (756.5, 756.5, 378, 51, 51), "H100 PCIe data sheet, 2023"),
        ("H100", "NVIDIA H100 80GB HBM3", 3350, HOPPER, "H100 SXM data sheet, 2023"),
        ("H200", "NVIDIA H200", 4800, HOPPER, "H200 SXM data sheet, 2024"),
    )
}
"""By common name. Where a sheet gives only the peak with sparsity, half of it."""


def sheet_of(device_name: str) -> DataSheet | None:
    """The sheet of a device by the name that its driver gives; None for CPUs and GPUs without a sheet here."""
    return next((sheet for sheet in SHEETS.values() if re.fullmatch(sheet.pattern, device_name)), None)


def max_prediction_throughput(sheet: DataSheet, cost: Cost) -> float:
    """Samples per second that a device cannot exceed in prediction: each image is read once, weights stay."""
    return min(sheet.flops / cost.forward_flops, sheet.bytes_per_second / cost.image_bytes)


def max_training_throughput(sheet: DataSheet, cost: Cost, batch_size: int) -> float:
    """Samples per second that a device cannot exceed in training."""
    weights = TRAFFIC_OF_TRAINING * WEIGHT_BYTES * cost.num_parameters / batch_size
    return min(sheet.flops / cost.training_flops, sheet.bytes_per_second / (cost.image_bytes + weights))
