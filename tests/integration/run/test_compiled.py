"""Trainings of a compiled network: the same losses, one graph also for a small ragged batch, and a cache that pays."""

import numpy as np
import pytest

from paceline.tasks.train.launch.coordinator import train_group

# 1,293 samples: the last of 41 batches has 13. In 32-true torch takes another convolution below 16: another graph.
OVERRIDES = ("recipe.batch_size=32", "model.depth=1", "execution.precision=bf16-mixed")


@pytest.mark.slow
def test_one_graph_serves_all_batches_and_the_next_training_finds_it_made(make_job, cluster_address):
    eager = train_group(make_job(*OVERRIDES), cluster_address)
    compiled = make_job(*OVERRIDES, "execution.compile=step")
    cold = train_group(compiled, cluster_address)
    again = make_job(*OVERRIDES, "execution.compile=step")
    warm = train_group(again, cluster_address)
    assert (cold.compile.num_calls, cold.compile.num_graphs) == (82, 1), cold.compile
    assert cold.compile.hit_rate == pytest.approx(81 / 82)
    assert (cold.compile.is_warm, warm.compile.is_warm) == (False, True)
    assert warm.compile.seconds < cold.compile.seconds
    np.testing.assert_allclose(cold.losses[:16], eager.losses[:16], rtol=5e-3)  # then roundings to bf16 drift apart
    assert cold.final_loss == pytest.approx(eager.final_loss, rel=0.15)
    np.testing.assert_allclose(warm.losses, cold.losses, rtol=1e-6)
