"""Whether two runs did the same work: the verdict that every comparison needs before it may give a number.

The model is the reference-convergence check of MLPerf: what is learned must be equal, how it is run may differ.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from paceline.conf.config import Config
from paceline.conf.load import flatten
from paceline.tasks.records.data import Pretrained
from paceline.tasks.records.execution import Plan
from paceline.tasks.speedup.study.records import FieldVerdict, MatchVerdict

UNKNOWN = "unknown"
ALLOWED = ("execution.", "data.root", "model.pretrained")  # data and weights are compared by content, wherever they lie
EXECUTION = "execution."
LOADER_ARGUMENTS = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
"""Arguments of a DataLoader, and so of the user's own classes, that change how samples are read and not which."""
ARITHMETIC = "arithmetic"
RESOLVED = ("accelerator", "precision", "compile", "memory_format", "loading", "strategy", "num_threads")
"""Settings that a plan has resolved where the configuration says `auto`."""


def comparison_facts(
    config: Config,
    data: str,
    code: str,
    versions: Mapping[str, str | None],
    plan: Plan,
    pretrained: Pretrained | None = None,
) -> dict[str, str]:
    """The facts that a verdict compares, as text."""
    settings = {
        key: str(value)
        for key, value in flatten(config).items()
        if key.startswith(("data.", "model.", "recipe.", "execution.")) or key == "seed"
    }
    if config.model.plugin is not None:
        settings["model.package"] = config.model.plugin.identity
    resolved = {f"execution.{name}": str(getattr(plan, name)) for name in RESOLVED}
    if plan.arithmetic is not None:
        resolved[ARITHMETIC] = plan.arithmetic
    others = {
        "data": data,
        "weights": pretrained.sha256[:12] if pretrained else "by the seed",
        "code": code,
        "versions": ", ".join(f"{name} {version or UNKNOWN}" for name, version in sorted(versions.items())),
        "device": plan.device_name,
        "global_batch_size": str(config.global_batch_size),
    }
    return settings | resolved | others


def is_execution(setting: str, same_work: Collection[str] = ()) -> bool:
    """Whether a setting may differ between compared runs; of own Lightning code the user names such in `same_work`."""
    return setting.startswith(EXECUTION) or setting in same_work or setting.rpartition(".")[2] in LOADER_ARGUMENTS


def module_facts(
    config: Config, code: str, versions: Mapping[str, str | None], plan: Plan, same_work: Collection[str] = ()
) -> dict[str, str]:
    """The same facts of the user's own Lightning code, whose loader gives each device a batch of one size."""
    of_both = (EXECUTION, "seed", "code", "versions", "device", ARITHMETIC)
    facts = comparison_facts(config, "", code, versions, plan)
    shared = {name: value for name, value in facts.items() if name.startswith(of_both)}
    own = {
        f"{EXECUTION if is_execution(name, same_work) else ''}{name}": value
        for name, value in _leaves(config.lightning.settings)
    }
    if config.lightning.ckpt_sha256 is not None:
        own["weights"] = config.lightning.ckpt_sha256[:12]
    return shared | own | {"packages": ", ".join(config.lightning.packages), "recipe.batch_scaling": "weak"}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)


def match(first: Mapping[str, str], second: Mapping[str, str]) -> MatchVerdict:
    """Compare the facts of two runs.

    Execution may differ. Everything that is learned, the code, the versions and the model of the devices must not. The
    arithmetic of GPUs may differ where the precision does, if both are known. The global batch may differ in one case
    only: it follows the number of devices under weak scaling in both runs.
    """
    scaling: Literal["none", "strong", "weak"] = "none"
    if world_of(first) != world_of(second):
        weak = all(facts.get("recipe.batch_scaling") == "weak" for facts in (first, second))
        same_share = first.get("recipe.batch_size") == second.get("recipe.batch_size")
        scaling = "weak" if weak and same_share else "strong"
    names = dict.fromkeys([*first, *second])
    if any(facts.get("execution.accelerator") == "gpu" for facts in (first, second)):
        names[ARITHMETIC] = None  # unknown of runs before it was set: then torch's default was TF32 in convolutions
    same_precision = first.get("execution.precision") == second.get("execution.precision")
    fields = []
    for name in names:
        values = first.get(name, UNKNOWN), second.get(name, UNKNOWN)
        follows = name == ARITHMETIC and not same_precision and UNKNOWN not in values
        verdict: Literal["same", "allowed", "breaks"] = "breaks"
        if values[0] == values[1] != UNKNOWN:
            verdict = "same"
        elif name.startswith(ALLOWED) or follows or (name == "global_batch_size" and scaling == "weak"):
            verdict = "allowed"
        fields.append(FieldVerdict(field=name, verdict=verdict, first=values[0], second=values[1]))
    matches = bool(fields) and all(field.verdict != "breaks" for field in fields)
    return MatchVerdict(matches=matches, scaling=scaling, fields=tuple(fields))


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Differing facts of two runs, each as `name before -> now`; for versions, each package."""
    changes = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name, UNKNOWN), now.get(name, UNKNOWN)
        if name == "versions" and old != new:
            gone, come = (set(text.split(", ")) for text in (old, new))
            changes.append(f"versions {', '.join(sorted(gone - come))} -> {', '.join(sorted(come - gone))}")
        elif old != new and name not in ("data.root", "model.pretrained"):
            changes.append(f"{name} {old} -> {new}")
    return changes


def world_of(facts: Mapping[str, str]) -> int | None:
    """The number of devices over all hosts; None where it is not known."""
    try:
        return int(facts["execution.num_nodes"]) * int(facts["execution.num_devices"])
    except (KeyError, ValueError):
        return None


def list_facts(verdict: MatchVerdict) -> str:
    """All facts by their verdict: how many are the same, which may differ and do, which break the comparison."""
    if not verdict.matches and is_unknown(verdict):
        return "not comparable: nothing is known of one of them"
    parts = [f"{sum(field.verdict == 'same' for field in verdict.fields)} facts the same"]
    for kind, words in (("allowed", "allowed to differ"), ("breaks", "breaks the comparison")):
        facts = [f"{it.field} ({it.first} against {it.second})" for it in verdict.fields if it.verdict == kind]
        if facts:
            parts.append(f"{words}: {', '.join(facts)}")
    return ("" if verdict.matches else "not comparable; ") + "; ".join(parts)


def is_unknown(verdict: MatchVerdict) -> bool:
    """Whether nothing is known of one of the runs."""
    return all(UNKNOWN in (field.first, field.second) for field in verdict.fields)


def differing(verdict: MatchVerdict) -> list[str]:
    """What forbids the comparison, or what differs and may, each with both values."""
    kind = "allowed" if verdict.matches else "breaks"
    return [f"{it.field} {it.first} against {it.second}" for it in verdict.fields if it.verdict == kind]


def explain(verdict: MatchVerdict) -> str:
    """One line: what forbids the comparison, or what differs and may."""
    facts = "; ".join(differing(verdict))
    if verdict.matches:
        return f"same work; {facts}" if facts else "same work, same execution"
    return f"not comparable: {'nothing is known of one of them' if is_unknown(verdict) else facts}"
