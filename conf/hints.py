"""Error messages in two parts, the fault and one action, and suggestions for unknown words."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

import yaml

CUTOFF = 0.71  # of difflib. Words that are less alike lead to suggestions that are wrong.
_WORDS = {
    "recipe.learning_rate": "lr rate max_lr base_lr",
    "recipe.num_epochs": "epochs epoch max_epochs num_train_epochs",
    "recipe.batch_size": "batch bs batch_size per_device_batch_size",
    "recipe.weight_decay": "wd decay",
    "recipe.optimizer": "opt optim",
    "recipe.schedule": "lr_scheduler lr_schedule",
    "recipe.warmup_epochs": "warmup warmup_steps",
    "execution.num_devices": "gpus gpu devices num_gpus ngpus nproc_per_node",
    "execution.num_nodes": "nodes nnodes",
    "execution.precision": "amp dtype mixed_precision bf16 fp16 fp32 tf32 allow_tf32",
    "execution.accelerator": "device cuda",
    "execution.num_threads": "threads",
    "execution.micro_batch": "micro_batch_size accumulate_grad_batches grad_accum",
    "cluster.num_workers": "workers num_workers nworkers",
    "execution.activation_checkpointing": "gradient_checkpointing activation_checkpoint",
    "recipe.ema": "ema_decay model_ema swa",
    "cluster.address": "scheduler scheduler_address",
    "seed": "seed random_seed manual_seed",
    "data.image_size": "size img_size resolution input_size",
    "data.root": "path dir data_dir data_path folder",
    "data.source": "dataset",
    "model.name": "arch architecture network backbone",
    "model.pretrained": "weights checkpoint finetune",
    "model.test_views": "tta tta_views",
}
ALIASES = {word: setting for setting, words in _WORDS.items() for word in words.split()}
"""Words of other tools and the settings that they mean, looked up before difflib is asked."""
_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true", "fp64": "64-true"}
VALUE_ALIASES = {"execution.precision": _PRECISIONS | dict.fromkeys(("tf32-true", "tensorfloat32", "high"), "tf32")}
_TIME = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|sec|m|min|h|d)")
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_RULES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list such as [a,b]"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a group of settings"),
    "finite_number": "a finite number",
    "string_type": "a text",
    "none_required": "null",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_too_short": "a text of {min_length} characters or more",
    "string_too_long": "a text of at most {max_length} characters",
    "too_short": "a list of {min_length} or more values",
    "too_long": "a list of at most {max_length} values",
}
"""pydantic's kinds of errors as what a value must be."""
_FORMS = {
    "speedup.baseline": "the id of a run",
    "track.register": "a name of letters, digits, blanks, _, . and -",
    "model.freeze": "the name of a layer",
}
"""Texts that must match a pattern."""
_SETTING = re.compile(
    r"(?:^|: )(--[a-z][a-z-]*|(?:cluster|data|execution|limits|model|recipe|speedup|track)(?:\.[a-z_]+)+)(?=[=:, ]|$)"
    r"|(?:^|: )([A-Z]+(?:_[A-Z]+)+)(?=[=:])|^([a-z_]+)(?==)"
)
"""The setting, the option or the variable that a message starts with, also behind where it was found."""


class HintedError(Exception):
    """An error with one action that can be pasted: `hint`, else what stands behind the last semicolon of the message.

    `setting` is the dotted name, option or variable that is wrong; without it, the one that the message starts with.
    """

    def __init__(self, message: str = "", *, hint: str | None = None, setting: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.setting = setting or setting_of(message)

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}; {self.hint}" if self.hint else message


def setting_of(message: str) -> str | None:
    """The setting, option or variable that a message is about."""
    setting_match = _SETTING.search(message)
    return setting_match[setting_match.lastindex or 0] if setting_match else None


def fault_and_hint(error: Exception) -> tuple[str, str | None]:
    """The two parts of an error."""
    if isinstance(error, HintedError) and error.hint:
        return str(error.args[0]), error.hint
    message, semicolon, last = str(error).rpartition("; ")
    return (message, last) if semicolon else (last, None)


def suggest_setting(word: str, settings: Iterable[str]) -> str | None:
    """The setting that a wrong name means, if one is near."""
    paths, last = list(settings), word.rpartition(".")[2].lower().replace("-", "_")
    same_name = [path for path in paths if path.rpartition(".")[2] == last]
    if len(same_name) == 1:
        return same_name[0]
    alias = ALIASES.get(last)
    return alias if alias in paths else suggest(word, paths)


def suggest(word: str, choices: Iterable[str]) -> str | None:
    """The nearest choice, if one is near."""
    words = list(choices)
    swapped = [choice for choice in words if sorted(choice) == sorted(word)]  # difflib finds rnu and run too different
    return next(iter(swapped or difflib.get_close_matches(word, words, n=1, cutoff=CUTOFF)), None)


def did_you_mean(suggestion: str | None, otherwise: str) -> str:
    """A suggestion as a hint."""
    return f"did you mean {suggestion}?" if suggestion else otherwise


def yaml_text(value: object) -> str:
    """A value as YAML on one line: null, true, [a, b]."""
    dumped = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return dumped.removesuffix("\n").removesuffix("\n...")


def typed(value: object) -> str:
    """A value as a user types it: a text without quotes, all else as in YAML."""
    try:
        return value if isinstance(value, str) else yaml_text(value)
    except yaml.YAMLError:
        return str(value)


def describe_refusal(key: str, errors: list[Any]) -> tuple[str, str]:
    """Fault and hint for a value that pydantic refused with an error for each kind of value that the setting takes."""
    value, key = typed(errors[0]["input"]), key or "it"
    see = f"look it up with: paceline settings {key}" if "--" not in key else f"write a valid value behind {key}"
    literals = [error["ctx"]["expected"] for error in errors if error["type"] == "literal_error"]
    choices = [choice.strip("'") for expected in literals for choice in re.split(r", | or ", expected)]
    shape = next((error["ctx"]["rule"] for error in errors if error["type"] == "shape"), None)
    listed = f"choices: {', '.join(choices)}" if choices else see
    if shape is not None:
        rule, _, fix = shape.partition("; ")
        return f"{key}={value} {rule}", fix or listed
    rules = list(dict.fromkeys(_rule(key, error) for error in errors if error["type"] != "literal_error"))
    if not rules:
        near = suggest(value, [*choices, *VALUE_ALIASES.get(key, ())])
        return f"{key}={value} is not valid", f"did you mean {near}? {listed.capitalize()}" if near else listed
    if errors[0]["type"] == "missing":
        return f"{key} is missing", "add it"
    seconds = " of seconds" if key.endswith("seconds") and rules[0] == "a number" else ""
    rules[0] += seconds
    rules += choices
    rule = " or ".join([", ".join(rules[:-1]), rules[-1]] if len(rules) > 1 else rules)
    time = _TIME.fullmatch(value) if seconds else None
    if time is not None:
        see = f"{value} is {key}={float(time['number']) * _SECONDS[time['unit']]:g}"
    return f"{key} must be {rule}, got {value}", see


def _rule(key: str, error: Any) -> str:
    if error["type"] == "string_pattern_mismatch":
        return _FORMS.get(key, "a text of another form")
    return _RULES.get(error["type"], "a value of another kind").format(**error.get("ctx", {}))
