"""The network for clips: each frame by itself, then what goes over them."""

import numpy as np
import pytest
import torch
from torch import nn

from paceline.conf.model import Model
from paceline.tasks.model.inference import fold_batch_norm
from paceline.tasks.model.networks.convolutional import Recurrent
from paceline.tasks.model.networks.registry import build_network

FRAMES, SIZE = 5, 12


def network_of(seed=0, **changes):
    torch.manual_seed(seed)
    model = Model(name="sequence", width=4, depth=1, **changes)
    return build_network(model, (SIZE, SIZE, 3 * FRAMES), 4, 0)


def clips_of(number=6):
    return torch.randn(number, 3 * FRAMES, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_the_recurrent_head_is_torchs_own_with_the_same_weights():
    torch.manual_seed(0)
    ours, theirs = Recurrent(8), nn.GRU(8, 8, batch_first=True)
    theirs.load_state_dict(
        {
            "weight_ih_l0": ours.see.weight,
            "weight_hh_l0": ours.remember.weight,
            "bias_ih_l0": ours.see.bias,
            "bias_hh_l0": ours.remember.bias,
        }
    )
    features_NTD = torch.randn(3, FRAMES, 8)
    torch.testing.assert_close(ours(features_NTD), theirs(features_NTD)[0][:, -1])


@torch.no_grad()
def test_the_order_of_frames_counts_and_clips_do_not_see_each_other():
    network, clips = network_of().eval(), clips_of()
    logits, targets = network(clips)
    assert (logits.shape, targets) == ((6, 4), None)
    torch.testing.assert_close(network(clips[2:3])[0], logits[2:3], rtol=1e-4, atol=1e-5)
    backwards = clips.unflatten(1, (FRAMES, 3)).flip(1).flatten(1, 2)
    assert not torch.allclose(network(backwards)[0], logits, atol=1e-3)


@torch.no_grad()
def test_it_says_the_same_folded_in_channels_last_and_nearly_so_in_bf16():
    network, clips = network_of(), clips_of(16)
    network.train()(clips)  # statistics of batch norms that are not those of the beginning
    network.eval()
    plain = network(clips)[0]
    folded = fold_batch_norm(network)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in folded.modules())
    torch.testing.assert_close(folded(clips)[0], plain, rtol=1e-3, atol=1e-4)
    last = clips.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(network.to(memory_format=torch.channels_last)(last)[0], plain, rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        reduced = network(clips)[0]
    assert reduced.dtype == torch.bfloat16
    np.testing.assert_allclose(reduced.float().numpy(), plain.numpy(), atol=0.1)


@pytest.mark.slow
def test_it_is_one_graph_when_compiled():
    network, clips = network_of().eval(), clips_of()
    compiled = torch.compile(network, fullgraph=True)
    torch.testing.assert_close(compiled(clips)[0], network(clips)[0], rtol=1e-3, atol=1e-4)


def test_views_are_the_mean_of_a_clip_and_its_mirror_image():
    network, clips = network_of(test_views=2).eval(), clips_of()
    with torch.no_grad():
        found = network(clips)[0]
        parts = [network.network(view)[0] for view in (clips, clips.flip(3))]
    torch.testing.assert_close(found, sum(parts) / 2, rtol=1e-4, atol=1e-5)
