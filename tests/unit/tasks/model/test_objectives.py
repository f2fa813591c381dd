"""Losses and scores of what is told of every pixel, on answers that are known."""

import numpy as np
import pytest
import torch

from paceline.conf.load import load
from paceline.conf.model import Model
from paceline.conf.recipe import Recipe
from paceline.tasks.model.batch import Batch
from paceline.tasks.model.inference import fold_batch_norm
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model.objectives import Classification, Denoising, Segmentation
from paceline.tasks.model.optimization import batch_loss
from paceline.tasks.scores import SCORE_OF_TASK, ious, mean_iou

RECIPE = Recipe()


def batch_of(images_NCHW, noise_seeds_N=None, weight=1.0):
    return Batch(images_NCHW, torch.zeros(len(images_NCHW), dtype=torch.int64), None, noise_seeds_N, weight)


def masked(masks_NHW):
    """Black pictures with these masks, as a loader delivers them."""
    masks = torch.as_tensor(masks_NHW, dtype=torch.float32)[:, None]
    return batch_of(torch.cat([torch.zeros_like(masks), masks], dim=1))


def test_the_score_counts_all_pixels_of_a_class_together():
    """Two pictures of 1 x 4 pixels; stored classes are from 1, and 0 is none."""
    batch = masked([[[1, 1, 2, 0]], [[2, 2, 2, 3]]])
    told = torch.tensor([[[0, 1, 1, 1]], [[1, 1, 0, 0]]])
    logits = 20.0 * torch.nn.functional.one_hot(told, 3).permute(0, 3, 1, 2).float()
    task = Segmentation(3)
    totals = task.statistics((logits, None), batch, task.inputs(batch)).sum(0)
    right, said, there = totals[1:].reshape(3, 3).tolist()
    assert (right, said, there) == ([1, 3, 0], [3, 4, 0], [2, 4, 1])
    assert ious(totals[1:].tolist()) == pytest.approx([1 / 4, 3 / 5, 0])
    assert task.score(totals.tolist(), 2) == mean_iou(totals[1:].tolist()) == pytest.approx((1 / 4 + 3 / 5) / 3)


def test_a_class_that_is_neither_told_nor_there_counts_for_nothing():
    assert ious([4, 0, 4, 0, 4, 0]) == [1.0, None]
    assert mean_iou([4, 0, 4, 0, 4, 0]) == 1.0
    assert mean_iou([]) == 0.0


def test_what_has_no_class_changes_no_loss_and_no_gradient():
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    masks = torch.randint(1, 4, (2, 4, 4))
    masks[0, :2] = 0
    task = Segmentation(3)
    loss = task.loss((logits, None), masked(masks), RECIPE)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient[0, :, :2] == 0).all()
    assert (gradient[0, :, 2:] != 0).all()
    ours = torch.nn.functional.cross_entropy(logits[:1, :, 2:], masks[:1, 2:] - 1)
    other = torch.nn.functional.cross_entropy(logits[1:], masks[1:] - 1)
    assert loss.item() == pytest.approx((ours + other).item() / 2)
    nothing = task.loss((logits[:1], None), masked(torch.zeros(1, 4, 4)), RECIPE)
    assert nothing.item() == 0


def test_two_halves_of_a_batch_have_the_gradient_of_the_whole():
    network = build_network(Model(name="unet", width=4, depth=2), (8, 8, 1), 3, 0).eval()
    masks = torch.randint(0, 4, (6, 8, 8))
    whole = masked(masks)
    parts = [
        whole._replace(images_NCHW=whole.images_NCHW[cut], labels_N=whole.labels_N[cut], weight=len(cut) * 2 / 6)
        for cut in (range(4), range(4, 6))
    ]

    def gradient(losses):
        found = torch.autograd.grad(sum(losses), [*network.parameters()])
        return torch.cat([values.flatten() for values in found])

    task = Segmentation(3)
    expected = gradient([batch_loss(network, whole, RECIPE, task)])
    found = gradient([batch_loss(network, part, RECIPE, task) / 2 for part in parts])
    torch.testing.assert_close(found, expected)


def test_the_noise_that_is_added_is_as_strong_as_asked_for():
    std = (0.2, 0.5)
    task = Denoising(25.0, std, seed=1)
    clean = torch.zeros(50, 2, 16, 16)
    noisy = task.inputs(batch_of(clean, torch.arange(50)))
    pixels = noisy * torch.tensor(std).view(1, 2, 1, 1) * 255
    assert pixels.std(dim=(0, 2, 3)).tolist() == pytest.approx([25.0, 25.0], rel=0.02)
    assert torch.equal(task.inputs(batch_of(clean[:1], torch.tensor([7])))[0], noisy[7])


def test_psnr_and_similarity_are_those_of_the_definition():
    std, rng = (0.25,), np.random.default_rng(0)
    clean = torch.from_numpy(rng.uniform(-1, 1, (3, 1, 24, 24)).astype(np.float32))
    task = Denoising(51.0, std, seed=1)
    batch = batch_of(clean, torch.arange(3))
    found = clean + 0.1
    seen = task.inputs(batch)
    loss, similar, psnr, noisy_psnr = task.statistics((found, None), batch, seen).T
    assert loss.tolist() == pytest.approx([0.01] * 3, rel=1e-4)
    assert psnr.tolist() == pytest.approx([-20 * np.log10(0.1 * 0.25)] * 3, rel=1e-4)
    assert noisy_psnr.tolist() == pytest.approx([-20 * np.log10(0.2)] * 3, abs=0.6)
    _, same, *_ = task.statistics((clean, None), batch, seen).T
    assert same.tolist() == pytest.approx([1.0] * 3)
    _, noisy, *_ = task.statistics((seen, None), batch, seen).T
    assert (noisy < similar).all()
    assert task.score([0.0, 1.5, 0.0, 0.0], 3) == 0.5


@pytest.mark.parametrize(("name", "outputs"), [("unet", 5), ("dncnn", 3)])
def test_networks_of_pixels_keep_the_size_and_can_be_folded(name, outputs):
    torch.manual_seed(0)
    network = build_network(Model(name=name, width=4, depth=3), (24, 16, 3), 5, 0)
    images = torch.randn(2, 3, 24, 16)
    for _ in range(3):
        network(images)  # running statistics
    network.eval()
    told, targets = network(images)
    assert told.shape == (2, outputs, 24, 16)
    assert targets is None
    folded = fold_batch_norm(network)
    assert not any(isinstance(layer, torch.nn.BatchNorm2d) for layer in folded.modules())
    torch.testing.assert_close(folded(images)[0], told, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("preset", "wrong", "said"),
    [
        ("digits", "model.name=unet", "the model needs masks; use model.name=unet with data.source=pairs or shapes"),
        (
            "shapes",
            "model.name=convblocks",
            "the model does not learn masks; use model.name=unet with data.source=pairs or shapes",
        ),
        (
            "shapes",
            "model.name=dncnn",
            "the model does not learn masks; use model.name=unet with data.source=pairs or shapes",
        ),
        ("shapes", "data.image_size=50", "use a multiple of 4"),
        ("shapes", "model.test_views=2", "use model.test_views=1"),
        ("textures", "model.depth=1", "use 2 or more"),
        ("textures", "recipe.noise=0", "recipe.noise"),
    ],
)
def test_what_does_not_go_together_is_refused(preset, wrong, said):
    with pytest.raises(ValueError, match=said):
        load(preset, [wrong])


@pytest.mark.parametrize(
    ("task", "kind"), [("classify", Classification), ("segment", Segmentation), ("denoise", Denoising)]
)
def test_a_tasks_score_is_known_without_its_network(task, kind):
    assert kind.score_name == SCORE_OF_TASK[task]
