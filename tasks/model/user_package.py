"""Whether the package of a trained model of the user's is what it was when it was trained. Imports no torch itself."""

from paceline.conf.hints import fault_and_hint
from paceline.conf.model import Model
from paceline.conf.plugins import EMBEDDED_MODELS, Plugin
from paceline.tasks.errors import InputError
from paceline.tasks.plugins import load_plugin


def check_package(model: Model, recorded: Plugin | None) -> str | None:
    """What of a user's model is not as it was when it was trained, for people; None if nothing is, or it is ours.

    InputError if the package is not installed here, or another one offers that name.
    """
    if model.name in EMBEDDED_MODELS:
        return None
    try:
        plugin, _ = load_plugin("model", model.name)
    except InputError as error:
        if recorded is None:
            raise
        wanted = f"install {recorded.package} {recorded.version}, which it was trained with"
        raise InputError(f"{fault_and_hint(error)[0]}; {wanted}") from error
    if recorded is None:
        return f"nobody has recorded which package model {model.name} was trained with; here is {plugin.identity}"
    if plugin.package != recorded.package:
        raise InputError(
            f"{plugin}: the model was trained with package {recorded.package} {recorded.version}, which offers that "
            f"name; install it in place of {plugin.package}"
        )
    if plugin.identity == recorded.identity:
        return None
    return f"model {model.name} was trained with {recorded.identity}, and here is {plugin.identity}"
