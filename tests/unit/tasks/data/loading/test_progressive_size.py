import pytest
import torch

from paceline.conf.load import load
from paceline.conf.recipe import Recipe
from paceline.tasks.data.loading.progressive_size import resize, size_of_epoch
from paceline.tasks.model.batch import Batch
from tests.support.refusals import refused


def sizes(start, full, num_epochs):
    recipe = Recipe(progressive_size=start, num_epochs=num_epochs)
    return [size_of_epoch(recipe, full, epoch) for epoch in range(num_epochs)]


@pytest.mark.parametrize(
    ("start", "full", "num_epochs", "expected"),
    [
        (16, 32, 8, [16, 16, 20, 20, 24, 24, 32, 32]),
        (128, 224, 4, [128, 160, 192, 224]),
        (16, 32, 3, [20, 24, 32]),
        (16, 32, 1, [32]),
        (12, 30, 4, [12, 16, 24, 30]),
        (None, 32, 2, [32, 32]),
    ],
)
def test_images_grow_in_four_stages_to_their_full_size(start, full, num_epochs, expected):
    assert sizes(start, full, num_epochs) == expected


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images_are_scaled_and_all_else_stays(layout):
    images = torch.rand(2, 3, 32, 32).contiguous(memory_format=layout)
    batch = Batch(images, torch.arange(2), None, None, 1.5)
    recipe = Recipe(progressive_size=16, num_epochs=4)
    small = resize(batch, recipe, 0)
    assert small.images_NCHW.shape == (2, 3, 16, 16)
    assert small.images_NCHW.is_contiguous(memory_format=layout)
    torch.testing.assert_close(small.images_NCHW.mean(), images.mean(), atol=0.01, rtol=0)
    assert (small.labels_N is batch.labels_N, small.weight) == (True, 1.5)
    assert resize(batch, recipe, 3) is batch


@pytest.mark.parametrize(
    ("preset", "setting", "data"),
    [
        ("twohead", "recipe.progressive_size=8", ["model.name=twohead", "recipe.progressive_size=null"]),
        ("cifar10_94", "recipe.progressive_size=16", ["model.name=whitened", "recipe.progressive_size=null"]),
        ("digits", "recipe.progressive_size=32", ["data.image_size=32"]),
        ("digits", "recipe.progressive_size=18", [4]),
        ("digits", "recipe.ema=1", ["recipe.ema=1", 0.999]),
        ("digits", "recipe.ema=0", ["recipe.ema=0", 0.999]),
        ("digits", "recipe.ema=1.5", [1.5]),
        ("digits", "recipe.ema=x", ["x"]),
    ],
)
def test_what_cannot_be_is_refused(preset, setting, data):
    with refused(setting.partition("=")[0], *data):
        load(preset, [setting, "data.image_size=32"])
