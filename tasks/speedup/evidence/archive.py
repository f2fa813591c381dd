"""The evidence of a run: an archive of its raw step times, its facts and a program that recomputes the summary.

The same content gives the same bytes. So a changed byte is noticed anywhere, in the archive's own headers too. The sums
protect against accidents: somebody who wants to deceive can write new ones.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from paceline.conf.config import Speedup
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.measure import carry_over, paired_ratio, probe, validity, warm_up
from paceline.tasks.names import Artifact
from paceline.tasks.records.measurement import ProbeResult
from paceline.tasks.records.training import Trained
from paceline.tasks.redact import redact_tree
from paceline.tasks.speedup import between_starts, diagnosis, factor_card
from paceline.tasks.speedup.data_sheet import sheet_of
from paceline.tasks.speedup.evidence import recompute
from paceline.tasks.speedup.limit_share import limit_share

FOLDER = "evidence/"  # in the archive
PLAN = "analysis_plan.json"
RULES = (probe, paired_ratio, warm_up, carry_over, validity, between_starts, diagnosis, factor_card, recompute)
"""Modules that schedule the blocks, choose what counts, and turn times into figures."""
WRITE_AGAIN = "write it again with: paceline evidence RUN_ID -o FILE"


@cache
def analysis_plan(settings: Speedup) -> bytes:
    """The settings of the probe, and the SHA-256 of each module of `RULES`, as this process has loaded it."""
    sums = {module.__name__: hashlib.sha256(Path(module.__file__ or "").read_bytes()).hexdigest() for module in RULES}
    return json_bytes({"settings": settings.model_dump(mode="json"), "rules": sums})


def json_bytes(tree: Any) -> bytes:
    """A document of the archive, without credentials."""
    return json.dumps(redact_tree(tree), indent=1).encode()


def find_steps(directory: Path, digest: str | None) -> bytes | None:
    """The step times of a probe, by their SHA-256, in the directory of a run."""
    contents = (path.read_bytes() for path in directory.glob("attempt-*/rank-0/steps.npz"))
    return next((content for content in contents if hashlib.sha256(content).hexdigest() == digest), None)


def _merge_processes(raw: Sequence[bytes]) -> dict[str, Any]:
    """The step times of several processes in one table, with the number of the process in each row."""
    loaded = [dict(np.load(io.BytesIO(content))) for content in raw]
    arms, arm = np.unique(np.concatenate([steps["arms"][steps.pop("arm")] for steps in loaded]), return_inverse=True)
    process = np.repeat(np.arange(len(loaded), dtype=np.int8), [steps["seconds"].size for steps in loaded])
    num_left_out = sum(steps.pop("num_left_out") for steps in loaded)
    columns = {name: np.concatenate([steps[name] for steps in loaded]) for name in loaded[0] if name != "arms"}
    return {"process": process, "arms": arms, "arm": arm.astype(np.int8), **columns, "num_left_out": num_left_out}


def evidence_files(
    raw: Sequence[bytes],
    trained: Trained,
    facts: dict[str, Any],
    summary: dict[str, Any],
    documents: dict[str, bytes],
) -> dict[str, bytes]:
    """The files of the archive by name: the `documents`, the analysis plan among them, and those of the measurement.

    `raw` has the step times of the training's probe, then those of the further processes that count. `facts` of the run
    are `contaminated`, `reasons`, the ratios `earlier` of earlier starts, and what identifies it. `summary` is as
    `--json` prints it, with `rows` as a terminal shows them; the figures are taken from it.

    Raises RunError: the step times give other figures than the summary.
    """
    measured, cost, share = trained.probe, trained.cost, limit_share(trained)
    assert measured is not None
    steps = _merge_processes(raw)
    names = ("window_first_step", "window_num_steps", "window_seconds")
    windows = {name: np.array([window[at] for window in trained.windows]) for at, name in enumerate(names)}
    windows["window_samples"] = np.array(trained.window_samples)
    sheet = sheet_of(trained.limit.device_name) if trained.limit and share.of_limit is not None else None
    facts = facts | {
        "version": recompute.VERSION,
        "analysis_plan": hashlib.sha256(documents[PLAN]).hexdigest(),
        "num_left_out": int(steps.pop("num_left_out")),
        "num_repeats": measured.num_repeats,
        "baseline": measured.baseline.label,
        "candidate": measured.candidate.label,
        "num_devices": measured.candidate.num_devices,
        "samples_per_step": measured.samples_per_step,
        "shares": diagnosis.share_terms(measured),
        "rank_times": diagnosis.rank_times(measured),
        "factors": _factor_terms(measured, summary["speedup"]["factors"]["factors"]),
        "rates": {
            "flops_per_sample": cost and cost.training_flops,
            "bytes_per_sample": trained.bytes_per_sample if cost else None,
            "limit_flops_per_second": share.limit_flops_per_second,
            "limit_bytes_per_second": share.limit_bytes_per_second,
            "sheet_flops_per_second": sheet and sheet.peaks.get(share.precision),
        },
    }
    recomputed = recompute.recompute(steps | windows, facts)
    figures = {name: _at(summary, name) for name in recomputed}
    if differ := recompute.differences(recomputed, figures):
        raise RunError(f"the step times give other figures for {', '.join(differ)}")
    columns = io.BytesIO()
    np.savez_compressed(columns, allow_pickle=False, **steps, **windows)
    arms = steps.pop("arms")
    steps["arm"] = pa.DictionaryArray.from_arrays(steps["arm"], arms.tolist())
    files = documents | {
        recompute.STEPS: columns.getvalue(),
        Artifact.STEPS: _parquet(steps, facts),
        Artifact.WINDOWS: _parquet({name.removeprefix("window_"): column for name, column in windows.items()}, facts),
        recompute.FACTS: json_bytes(facts),
        recompute.SUMMARY: json_bytes({"figures": figures, "rows": summary["rows"]}),
        "recompute.py": Path(recompute.__file__).read_bytes(),
    }
    return files | {recompute.SUMS: recompute.sums_of(files)}


def _factor_terms(measured: ProbeResult, card: Sequence[Mapping[str, Any]]) -> dict[str, factor_card.Terms]:
    """Weights behind the factor card by the pattern of their figures; the steps of a search are not in the evidence."""
    weights = {name: terms for name, (_, terms) in factor_card.factor_terms(measured).items()}
    patterns = {
        f"factors.{place}.{{}}": weights.get(factor["factor"], {})
        for place, factor in enumerate(card)
        if factor["basis"] != "in the search"
    }
    return patterns | {"interaction{}": weights.get(factor_card.INTERACTION, {})}


def _at(summary: dict[str, Any], path: str) -> float | None:
    value: Any = summary
    for name in path.split("."):
        value = value[int(name) if isinstance(value, (list, tuple)) else name]
    return None if value is None else float(value)


def _parquet(columns: Mapping[str, Any], facts: Mapping[str, Any]) -> bytes:
    content = io.BytesIO()
    table = pa.table(columns).replace_schema_metadata({"paceline": json_bytes(facts)})
    parquet.write_table(table, content, compression="zstd")
    return content.getvalue()


def pack(files: Mapping[str, bytes]) -> bytes:
    """The archive of these files."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(FOLDER + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def unpack(content: bytes, name: str) -> dict[str, bytes]:
    """The files of an archive. Raises InputError: it is not evidence, or a byte of it has changed."""
    files = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.type == tarfile.REGTYPE else None
                files[member.name.removeprefix(FOLDER)] = stream.read() if stream else b""
    except (tarfile.TarError, ValueError, EOFError):
        files = {}
    if not files or pack(files) != content:
        raise InputError(f"{name} is not evidence, or has changed", hint=WRITE_AGAIN, setting="--check")
    return files


def check(content: bytes, name: str) -> recompute.Figures:
    """The figures of an archive, recomputed; the program inside is not executed.

    Raises InputError: it has changed, is of another version or a busy machine, or gives other figures than the summary.
    """
    try:
        figures, differ = recompute.check(unpack(content, name))
    except recompute.EvidenceError as error:
        hints = {"version": "run the recompute.py of the archive", "disturbed": "repeat the run on a quiet machine"}
        hint = next((hint for word, hint in hints.items() if word in str(error)), WRITE_AGAIN)
        raise InputError(f"{name}: {error}", hint=hint, setting="--check") from error
    if differ:
        raise InputError(f"{name}: its steps give other figures: {', '.join(differ)}", hint=WRITE_AGAIN)
    return figures
