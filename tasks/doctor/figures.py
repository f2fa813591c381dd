"""Figures of devices and their links, and which of them are outliers. Pure functions."""

import statistics
from collections.abc import Iterable, Mapping

from pydantic import Field

from paceline.tasks.doctor.finding import Finding, doubtful, good
from paceline.tasks.records.record import Record
from paceline.tasks.speedup.data_sheet import sheet_of

MIN_PEERS = 3  # of the same kind, for a comparison with their median
MIN_SHARE = 0.8  # of the peers' median, or of the last measurement
MIN_SHEET_SHARE = 0.5  # of the data sheet, which no real program reaches
MEMORY, COPY, DISK, LINK = "memory", "host_to_device", "disk", "all-reduce"
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
REPEAT = "measure again while nothing else runs there"
CHECK_HOST = "look at its clock, temperature, ECC errors and other processes, then measure again"
CHECK_LINK = "look at cables, switches and the chosen interface (NCCL_DEBUG=INFO), then measure again"


class DeviceFigures(Record):
    """Rates of one device."""

    host: str
    device: str  # UUID of the GPU, or the number of the host's share of cores, such as `cpu-0`
    model: str
    num_threads: int | None  # CPU threads; None on a GPU
    rates: dict[str, float | None] = Field(default_factory=dict)
    """FLOP/s of matrix products by precision; bytes per second of `memory` (a copy, read and written),
    `host_to_device` (None on CPUs) and `disk` (on the first device of a host)."""
    disturbed: tuple[str, ...] = ()  # other work on the host meanwhile; such rates are not compared

    @property
    def name(self) -> str:
        """Host and device."""
        return f"{self.host} {self.device}"

    @property
    def measured_rates(self) -> dict[str, float]:
        """Those that are not None."""
        return {name: rate for name, rate in self.rates.items() if rate is not None}


class LinkFigures(Record):
    """Rate of all-reduces among some devices."""

    devices: tuple[str, ...]  # host and device of each
    # Bus bandwidth: 2 (n - 1) / n times the message over the time, so that groups of n devices can be compared.
    bytes_per_second: float


class Measurements(Record):
    """Measurements of the devices of a cluster."""

    devices: tuple[DeviceFigures, ...] = ()
    links: tuple[LinkFigures, ...] = ()
    skipped: dict[str, str] = Field(default_factory=dict)  # devices and links that were not measured, and why


class DeviceJob(Record):
    """Work of a process that measures a device alone, or its links in a group."""

    device: DeviceFigures  # without rates
    num_threads: int
    index: int = 0  # of the GPU among the visible ones
    directory: str | None = None  # directory of the temporary file; None to leave the disk alone
    group: tuple[str, ...] = ()  # names of the devices of the group by rank; empty to measure the device alone
    address: str = ""
    port: int = 0


def judge_measurements(measured: Measurements, last: Measurements | None) -> list[Finding]:
    """One finding for each device and for the links; those that are slow against others are doubtful."""
    last = last or Measurements()
    before = {device.name: device for device in last.devices if not device.disturbed}
    quiet = [device for device in measured.devices if not device.disturbed]
    skipped = measured.skipped.items()
    findings = [doubtful(f"measure {name}", f"not measured: {reason}", REPEAT) for name, reason in skipped]
    for device in measured.devices:
        rates = ", ".join(f"{name} {_rate(name, rate)}" for name, rate in device.measured_rates.items())
        text = f"{device.model}: {rates}"
        if device.disturbed:
            findings.append(doubtful(f"measure {device.name}", f"{text}; {'; '.join(device.disturbed)}", REPEAT))
            continue
        peers = [other for other in quiet if other != device and _kind(other) == _kind(device)]
        slow = _below_peers(device.measured_rates, [peer.measured_rates for peer in peers])
        if (sheet := sheet_of(device.model)) is not None:
            peaks = sheet.peaks | {MEMORY: sheet.bytes_per_second}
            slow += _below(device.measured_rates, peaks, MIN_SHEET_SHARE, "of the data sheet")
        if (earlier := before.get(device.name)) is not None and _kind(earlier) == _kind(device):
            slow += _below(device.measured_rates, earlier.measured_rates, MIN_SHARE, "of the last measurement")
        findings.append(_finding(f"measure {device.name}", text, slow, CHECK_HOST))
    if measured.links:
        findings.append(_judge_links(measured.links, last.links))
    return findings


def _finding(check: str, text: str, slow: list[str], remedy: str) -> Finding:
    return doubtful(check, f"{text}; {'; '.join(slow)}", remedy) if slow else good(check, text)


def _kind(device: DeviceFigures) -> tuple[str, int | None]:
    return device.model, device.num_threads


def _below(rates: Mapping[str, float], others: Mapping[str, float], share: float, what: str) -> list[str]:
    return [
        f"{name} is {rate / others[name]:.2f} {what}"
        for name, rate in rates.items()
        if name in others and rate < share * others[name]
    ]


def _below_peers(rates: Mapping[str, float], peers: list[dict[str, float]]) -> list[str]:
    of_peers = {name: [peer[name] for peer in peers if name in peer] for name in rates}
    medians = {name: statistics.median(values) for name, values in of_peers.items() if len(values) >= MIN_PEERS}
    return _below(rates, medians, MIN_SHARE, "of the median of its peers")


def _judge_links(links: Iterable[LinkFigures], last: Iterable[LinkFigures]) -> Finding:
    listed = sorted(links, key=lambda link: link.bytes_per_second)
    before = {link.devices: {LINK: link.bytes_per_second} for link in last}
    slow: list[str] = []
    for link in listed:
        rates = {LINK: link.bytes_per_second}
        peers = [{LINK: other.bytes_per_second} for other in listed if other != link and _reach(other) == _reach(link)]
        texts = _below_peers(rates, peers)
        texts += _below(rates, before.get(link.devices, {}), MIN_SHARE, "of the last measurement")
        slow += [f"{' - '.join(link.devices)}: {text}" for text in texts]
    ends = dict.fromkeys(
        f"{' - '.join(link.devices)} {_rate(LINK, link.bytes_per_second)}" for link in (listed[0], listed[-1])
    )
    return _finding("measure links", f"{len(listed)} measured, slowest first: {', '.join(ends)}", slow, CHECK_LINK)


def _reach(link: LinkFigures) -> tuple[int, int]:
    """Numbers of devices and of hosts: links within a host are faster than those between hosts."""
    return len(link.devices), len({name.split()[0] for name in link.devices})


def _rate(name: str, rate: float) -> str:
    unit = "B/s" if name in (MEMORY, COPY, DISK, LINK) else "FLOP/s"
    scale, prefix = next(((scale, prefix) for scale, prefix in UNITS if rate >= scale), (1.0, ""))
    return f"{rate / scale:.3g} {prefix}{unit}"
