"""torch.compile: one graph for batches of any size, and statistics of its compilation."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch._dynamo import utils
from torch.fx.experimental import _config as fx_config

from paceline.conf.execution import Compile
from paceline.tasks.records.training import CompileStats


def compile_network(network: nn.Module) -> None:
    """Compile in place; copies of the network are eager."""
    # Inductor chooses between two ways to sum at 4,096 summands. That would be a guard on the batch size, and a small
    # last batch a second graph (torch 2.13). Sums of batch norm do not change.
    fx_config.backed_size_oblivious = True
    # On CPUs, small networks spend as much time between kernels as in them: compile what calls them too.
    is_on_cpu = all(parameter.device.type == "cpu" for parameter in network.parameters())
    # The inner module, not Lightning's: `self.log` in a compiled LightningModule crashes.
    network.compile(options={"cpp_wrapper": True} if is_on_cpu else None)


class CompileParts(Callback):
    """Compiles in place what the steps of a user's module call: its `forward`, and its direct submodules.

    Not the steps themselves, where each call of Lightning would end a graph. The hook comes after `configure_model`.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compile the module of the trainer."""
        has_forward = type(pl_module).forward is not LightningModule.forward
        for network in (*([pl_module] if has_forward else []), *_networks(pl_module)):
            network.forward = _CompiledForward(network)


def compile_callbacks(setting: Compile) -> list[Callback]:
    """The callback that a trainer needs for `execution.compile`; none where the module is eager."""
    return [] if setting == "off" else [CompileParts()]


class _CompiledForward:
    """`forward`, compiled. A copy of the module, also by pickle, has the one that is not compiled."""

    def __init__(self, module: nn.Module) -> None:
        # `isolate_recompiles`: otherwise equal networks share one recompile limit. torch's type stubs lack it (2.13).
        options = {"fallback_random": True}  # the random numbers of an eager module
        compiled: Any = torch.compile(module.forward, isolate_recompiles=True, options=options)  # type: ignore[call-overload]
        self._module, self._compiled = module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")


def _networks(module: nn.Module) -> Iterator[nn.Module]:
    """The direct submodules with parameters. Lists and dictionaries have no `forward`: their elements instead."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _networks(child)
        elif any(True for _ in child.parameters()):
            yield child


def any_batch_size(images_NCHW: torch.Tensor) -> None:
    """Let the graph of this batch accept batches of all sizes, so that a ragged last one needs no second graph."""
    # Images of another size, as of `recipe.progressive_size`, have a graph of their own: torch would else make the
    # graph of the second size one for all sizes, whose kernels are slower.
    torch._dynamo.maybe_mark_dynamic(images_NCHW, 0)
    torch._dynamo.mark_static(images_NCHW, [2, 3])


class CompileWatch:
    """Statistics of compilations since its creation: Dynamo counts for the complete process."""

    def __init__(self) -> None:
        self._before = _counts()

    def stats(self, num_calls: int) -> CompileStats | None:
        """Compilations since, for that number of calls of the network; None without calls or graphs."""
        num_graphs, hits, misses, _ = (now - then for now, then in zip(_counts(), self._before, strict=True))
        if not num_calls or not num_graphs:
            return None
        frames = utils.get_compilation_metrics()[self._before[-1] :]
        return CompileStats(
            num_calls=num_calls,
            num_graphs=num_graphs,
            hit_rate=max(0.0, 1 - num_graphs / num_calls),
            seconds=sum(_seconds(frame) for frame in frames),
            is_warm=hits > 0 and misses == 0,
            recompile_reasons=tuple(frame.recompile_reason for frame in frames if frame.recompile_reason),
        )


def _counts() -> tuple[int, ...]:
    """Graphs, hits and misses of the cache, and compilations, of the process so far."""
    graphs, cache = utils.counters["stats"]["unique_graphs"], utils.counters["inductor"]
    return graphs, cache["fxgraph_cache_hit"], cache["fxgraph_cache_miss"], len(utils.get_compilation_metrics())


def _seconds(frame: utils.CompilationMetrics) -> float:
    if frame.is_forward is False:  # compiled when the first backward pass comes
        return (frame.duration_us or 0) / 1e6
    return frame.entire_frame_compile_time_s or 0.0
