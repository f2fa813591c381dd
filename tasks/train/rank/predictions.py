"""Evaluates a trained network on this rank's share of a split, or saves its predictions."""

import copy
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from paceline.conf.execution import Precision
from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.model.batch import Batch, take_samples
from paceline.tasks.model.inference import Int64s, fold_batch_norm, predictions
from paceline.tasks.model.objectives import PixelTask, Task
from paceline.tasks.train.launch.layout import EXAMPLES_FILE
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.context import RankContext
from paceline.tasks.train.step.learner import Learner
from paceline.tasks.train.step.precision import forward_context, prepare_network, set_arithmetic

FEW_SAMPLES = 8
LONG_BATCH_SECONDS = 0.1
NUM_WORST_EXAMPLES, NUM_FIRST_EXAMPLES = 4, 2  # examples in the report
Autocast = AbstractContextManager[object]


def gather_network(context: RankContext, learner: Learner) -> nn.Module:
    """The network to evaluate: unsharded, because ranks evaluate different batches, and with averaged weights if any.

    Its floating-point buffers are those of one rank unless the weights are averaged ones.
    """
    plan, network, average = context.spec.plan, learner.network, learner.average
    if plan.strategy == "fsdp":
        channels_last = plan.memory_format == "channels_last"
        replica = prepare_network(context.network, "32-true", channels_last, context.device)
        replica.load_state_dict(get_model_state_dict(network, options=StateDictOptions(full_state_dict=True)))
        network = replica
    elif average is not None:
        network = copy.deepcopy(network)
    if average is not None:
        average.load_into(network, int(learner.global_step))
        group.average_buffers(network)
    return network


def inference_network(context: RankContext, network: nn.Module) -> nn.Module:
    """The network with batch norms folded; eager, so that a compiled one has only the graph of its training steps."""
    precision = context.spec.plan.precision
    return prepare_network(fold_batch_norm(network), precision, context.evaluates_channels_last, context.device)


def validate(context: RankContext, learner: Learner) -> list[float]:
    """[samples, sums of the task's statistics] of the validation split, over all ranks; empty without one."""
    if not context.prepared.num_validation:
        return []
    group.average_buffers(learner.network)
    network = inference_network(context, gather_network(context, learner))
    return count_statistics(context, network, "validation", context.spec.plan.precision)


def count_statistics(
    context: RankContext, network: nn.Module, split: Literal["validation", "test"], precision: Precision
) -> list[float]:
    """[samples, sums of the task's statistics] of a split, over all ranks."""
    task, device = context.task, context.device
    set_arithmetic(precision, device)
    autocast = forward_context(precision, device)
    counts = torch.zeros(1 + task.num_statistics, dtype=torch.float64, device=device)
    batches = context.evaluation(open_split(context.prepared, split))
    for prediction in predictions(network, batches, autocast, task):
        statistics_NS = task.statistics(prediction.outputs, prediction.batch, prediction.inputs_NCHW)
        counts[0] += len(statistics_NS)
        counts[1:] += statistics_NS.sum(0)
    totals: list[float] = group.all_reduce(counts, "sum").tolist()
    return totals


def predict_test_split(context: RankContext, network: nn.Module) -> dict[str, Any]:
    """Save the predictions of this rank's share of the test split, and return fields of the result.

    The file has `index` (N), `kept` (N x K or N x S) and, where there are any, `targets` (N x T); N may be 0.
    """
    task, prepared = context.task, context.prepared
    split = open_split(prepared, "test")
    set_arithmetic(context.spec.plan.precision, context.device)
    autocast = forward_context(context.spec.plan.precision, context.device)
    _warm_up(network, context.evaluation(split), autocast, task, is_cpu=context.device.type == "cpu")
    indices, kept = [np.zeros(0, np.int64)], [np.zeros((0, task.num_kept), np.float32)]
    targets = [np.zeros((0, len(prepared.target_names)), np.float32)]
    started = time.perf_counter()
    for prediction in predictions(network, context.evaluation(split), autocast, task):
        kept_N = task.select_outputs(prediction.outputs, prediction.batch, prediction.inputs_NCHW)
        indices.append(prediction.indices_N)
        kept.append(kept_N.cpu().numpy())
        if prediction.outputs[1] is not None:
            targets.append(prediction.outputs[1].cpu().numpy())
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=context.device)
    index_N, kept_NK = np.concatenate(indices), np.concatenate(kept)
    path = context.directory / "predictions.npz"
    if prepared.target_names:
        np.savez(path, index=index_N, kept=kept_NK, targets=np.concatenate(targets))
    else:
        np.savez(path, index=index_N, kept=kept_NK)
    examples = context.directory / EXAMPLES_FILE
    if context.writes and len(indices) > 1 and isinstance(task, PixelTask):
        # The samples with the largest loss, the worst first, and the first ones of the others.
        worst = index_N[np.argsort(-kept_NK[:, 0], kind="stable")[:NUM_WORST_EXAMPLES]]
        chosen = np.concatenate([worst, index_N[~np.isin(index_N, worst)][:NUM_FIRST_EXAMPLES]])
        _save_examples(examples, network, context.samples(split, chosen), autocast, task)
    return {
        "predictions": (str(path),),
        "examples": str(examples) if examples.exists() else None,
        "prediction_samples_per_second": split.num_samples / float(group.all_reduce(seconds, "max").item()),
    }


def save_weights(context: RankContext, network: nn.Module) -> str | None:
    """Write the weights on rank 0; return their path."""
    if not context.writes:
        return None
    path = context.directory / "weights.pt"
    torch.save({name: tensor.cpu() for name, tensor in network.state_dict().items()}, path)
    return str(path)


def _warm_up(
    network: nn.Module, batches: Iterable[tuple[Int64s, Batch]], autocast: Autocast, task: Task, *, is_cpu: bool
) -> None:
    """Predict the first batch and a shorter one, as the last of a split mostly is: libraries tune themselves here.

    On a CPU that takes milliseconds, which do not count where a batch takes `LONG_BATCH_SECONDS`.
    """
    first = next(iter(batches), None)
    if first is None:
        return
    indices_N, batch = first

    def predict(number: int) -> float:
        started = time.perf_counter()
        for _ in predictions(network, [(indices_N[:number], take_samples(batch, 0, number))], autocast, task):
            pass
        return time.perf_counter() - started

    few = min(len(indices_N), FEW_SAMPLES)
    if is_cpu and min(predict(few), predict(few)) * len(indices_N) > LONG_BATCH_SECONDS * few:
        return
    for number in {len(indices_N), max(1, len(indices_N) - 1)}:
        predict(number)


def _save_examples(path: Path, network: nn.Module, batch: Batch, autocast: Autocast, task: PixelTask) -> None:
    """Write the network's inputs (n, C, H, W), its outputs and the labels, as the task shows them."""
    (prediction,) = predictions(network, [(np.arange(len(batch.labels_N)), batch)], autocast, task)
    shown = (prediction.inputs_NCHW, *task.select_example(prediction.outputs, batch))
    inputs, outputs, labels = (tensor.float().cpu().numpy() for tensor in shown)
    np.savez(path, seen=inputs, told=outputs, there=labels)
