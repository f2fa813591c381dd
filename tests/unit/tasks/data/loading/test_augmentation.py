"""Crops, colours, mixtures and growing images by what is known of them."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from paceline.conf.load import ConfigError, load
from paceline.conf.recipe import Recipe, Vary
from paceline.tasks.data.loading.augmentation import (
    Variation,
    beta,
    boxes,
    draw_mix,
    mix,
    resize_boxes,
    resize_for_epoch,
    size_of_epoch,
)
from paceline.tasks.data.loading.batch import PinnedRing
from paceline.tasks.fingerprint import workload_fingerprint
from paceline.tasks.model.batch import Batch
from paceline.tasks.model.noise import uniform
from paceline.tasks.model.objectives import Classification
from tests.support.refusals import refused
from tests.unit.tasks.data.loading.test_loader import KINDS, assert_equal, loader_of, make_split

SHAPE = (24, 20)
NUM = 2_000
CPU = torch.device("cpu")
RING = PinnedRing(CPU)
DRAWS = np.arange(NUM)


def uniforms(num=NUM, seed=1):
    return uniform(torch.from_numpy(DRAWS[:num]), 29, seed).numpy()


def images(num=6, channels=3):
    return torch.rand(num, channels, *SHAPE, generator=torch.Generator().manual_seed(1))


def batch_of(images_NCHW):
    return Batch(images_NCHW, torch.arange(len(images_NCHW)) % 10, None, None, 1.0)


def varied(images_NCHW, mean=0.0, std=1.0, **settings):
    channels = images_NCHW.shape[1]
    vary = Variation(Vary(**settings), [mean] * channels, [std] * channels, 1, CPU)
    drawn = RING.copy(vary.draw(DRAWS[: len(images_NCHW)], SHAPE))
    return vary(batch_of(images_NCHW), drawn, channels_last=False)


def test_uniform_numbers_are_uniform_and_depend_on_draw_place_and_seed_alone():
    values_NU = uniforms()
    assert values_NU.min() >= 0
    assert values_NU.max() < 1
    assert np.abs(values_NU.mean(axis=0) - 0.5).max() < 4 * np.sqrt(1 / 12 / NUM)
    between = np.corrcoef(values_NU.T) - np.eye(29)
    assert np.abs(between).max() < 5 / np.sqrt(NUM)
    alone = uniform(torch.tensor([7]), 5, 1).numpy()
    np.testing.assert_array_equal(alone[0], values_NU[7, :5])
    assert not np.array_equal(uniforms(seed=2), values_NU)


def test_a_crop_is_what_is_cut_out_and_scaled():
    boxes_N4 = np.array([[0, 0, 24, 20], [3, 5, 12, 9], [23, 19, 1, 1], [0, 7, 24, 2], [4, 0, 5, 20], [10, 3, 7, 7]])
    found_NCHW = resize_boxes(images(), torch.from_numpy(boxes_N4))
    for image, found, (top, left, height, width) in zip(images(), found_NCHW, boxes_N4, strict=True):
        cut = image[None, :, top : top + height, left : left + width]
        expected = functional.interpolate(cut, SHAPE, mode="bilinear", align_corners=False)[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found_NCHW[0], images()[0], atol=1e-5, rtol=0)


def test_crops_have_the_areas_and_ratios_that_are_asked_for():
    tall, wide = 224, 224
    top, left, height, width = boxes(Vary(crop_scale=(0.08, 1.0)), uniforms(), (tall, wide)).T
    assert min(top.min(), left.min()) >= 0
    assert (top + height).max() <= tall
    assert (left + width).max() <= wide
    ratio = width / height
    assert ratio.min() > 3 / 4 - 0.02
    assert ratio.max() < 4 / 3 + 0.02
    area = height * width / (tall * wide)
    assert area.min() > 0.07
    assert np.quantile(area, 0.1) == pytest.approx(0.08 + 0.1 * 0.92, abs=0.03), "uniform where all ratios fit"
    whole = boxes(Vary(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0)), uniforms(), (tall, wide))
    assert (whole == [0, 0, tall, wide]).all()
    none_fits = boxes(Vary(crop_scale=(1.0, 1.0), crop_ratio=(2.0, 2.0)), uniforms(), (tall, wide))
    assert (none_fits == [56, 0, 112, 224]).all(), "the largest one of that ratio, in the middle"


def test_brightness_multiplies_and_normalisation_is_undone_first():
    plain = images()
    found = varied((plain - 0.4) / 0.2, mean=0.4, std=0.2, brightness=0.5).images_NCHW * 0.2 + 0.4
    factor = 1 + 0.5 * (2 * uniforms(6)[:, 22] - 1)
    expected = (plain * torch.from_numpy(factor).float().view(-1, 1, 1, 1)).clamp(0, 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_contrast_keeps_the_mean_grey_and_saturation_each_pixels_grey():
    plain = 0.4 + 0.2 * images()  # nothing is cut off at black or white
    luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    contrasted = varied(plain, contrast=0.5).images_NCHW
    torch.testing.assert_close((contrasted * luma).sum(1).mean((1, 2)), (plain * luma).sum(1).mean((1, 2)))
    assert not torch.allclose(contrasted, plain)
    saturated = varied(plain, saturation=0.5).images_NCHW
    torch.testing.assert_close((saturated * luma).sum(1), (plain * luma).sum(1))
    assert not torch.allclose(saturated, plain)
    grey = plain[:, :1].expand(-1, 3, -1, -1)
    torch.testing.assert_close(varied(grey, saturation=0.5).images_NCHW, grey)


def test_colours_of_a_clip_change_in_all_its_frames_alike():
    """Its frames are the channels of one image; the grey of one has no part in another."""
    frames = [0.4 + 0.2 * images(), 0.3 + 0.1 * images().flip(3)]
    found = varied(torch.cat(frames, dim=1), saturation=0.5, brightness=0.3).images_NCHW
    alone = [varied(frame, saturation=0.5, brightness=0.3).images_NCHW for frame in frames]
    torch.testing.assert_close(found, torch.cat(alone, dim=1))
    luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    contrasted = varied(torch.cat(frames, dim=1), contrast=0.5).images_NCHW.split(3, dim=1)
    means = [sum(frame.mul(luma).sum(1).mean((1, 2)) for frame in clip) for clip in (contrasted, frames)]
    torch.testing.assert_close(*means)


def test_beta_is_the_distribution_of_that_name():
    uniform_N = uniforms()[:, 0]
    np.testing.assert_allclose(beta(1.0, uniform_N), uniform_N, atol=1e-12)
    drawn = beta(0.2, uniform_N)
    assert drawn.mean() == pytest.approx(0.5, abs=0.04)
    assert drawn.var() == pytest.approx(1 / (4 * (2 * 0.2 + 1)), abs=0.01)


def test_mixup_is_a_mean_of_two_and_its_loss_one_of_their_losses():
    plain, logits_NK = images(), torch.randn(6, 10, generator=torch.Generator().manual_seed(2))
    found = varied(plain, mixup=0.4)
    share = found.mix_weights_N.view(-1, 1, 1, 1)
    torch.testing.assert_close(found.images_NCHW, share * plain + (1 - share) * plain.flip(0))
    assert torch.equal(found.labels_N, torch.arange(6))
    assert torch.equal(found.mixed_labels_N, torch.arange(6).flip(0))
    soft_NK = functional.one_hot(found.labels_N, 10) * found.mix_weights_N[:, None]
    soft_NK = soft_NK + functional.one_hot(found.mixed_labels_N, 10) * (1 - found.mix_weights_N[:, None])
    for smoothing in (0.0, 0.1):
        loss = Classification(10).loss((logits_NK, None), found, Recipe(label_smoothing=smoothing))
        torch.testing.assert_close(loss, functional.cross_entropy(logits_NK, soft_NK, label_smoothing=smoothing))


def test_a_share_of_one_leaves_image_and_loss_as_they_were():
    plain = batch_of(images())
    uniform_N4 = np.full((6, 4), 1.0)  # the largest of any distribution
    found = mix(plain, RING.copy(draw_mix(Vary(mixup=0.2), uniform_N4, SHAPE)))
    assert torch.equal(found.images_NCHW, plain.images_NCHW)
    logits_NK = torch.randn(6, 10)
    one, other = (Classification(10).loss((logits_NK, None), batch, Recipe()) for batch in (found, plain))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mixup", [0.0, 0.3])
def test_cutmix_shares_are_the_areas_that_are_seen(mixup):
    own = torch.arange(1.0, 65.0).view(-1, 1, 1, 1).expand(-1, 1, *SHAPE)
    found = varied(own, cutmix=1.0, mixup=mixup)
    other = own.flip(0)
    cut_N = ((found.images_NCHW == own) | (found.images_NCHW == other)).all(dim=(1, 2, 3))
    assert cut_N.all() if not mixup else 16 < int(cut_N.sum()) < 48, "a coin for each"
    seen_N = (found.images_NCHW == own).float().mean(dim=(1, 2, 3))
    torch.testing.assert_close(found.mix_weights_N[cut_N], seen_N[cut_N])
    assert 0.2 < found.mix_weights_N.mean() < 0.8
    blended_NCHW = found.mix_weights_N.view(-1, 1, 1, 1) * own + (1 - found.mix_weights_N.view(-1, 1, 1, 1)) * other
    torch.testing.assert_close(found.images_NCHW[~cut_N], blended_NCHW[~cut_N])


ALL = Vary(crop_scale=(0.3, 1.0), brightness=0.3, contrast=0.3, saturation=0.3, mixup=0.2, cutmix=1.0)


@pytest.mark.parametrize("channels_last", [False, True])
def test_all_loaders_vary_alike_bit_for_bit_and_in_every_epoch_anew(tmp_path, channels_last):
    split = make_split(tmp_path, targets=False)
    found = {}
    for kind in KINDS:
        loader = loader_of(split, kind, channels_last=channels_last, vary=ALL)
        found[kind] = [batch for _ in range(2) for batch in loader]
        loader.close()
    for kind in ("streaming", "foreground"):
        assert_equal(found["resident"], found[kind])
        for one, other in zip(found["resident"], found[kind], strict=True):
            assert torch.equal(one.mix_weights_N, other.mix_weights_N)
            assert torch.equal(one.mixed_labels_N, other.mixed_labels_N)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert all(batch.images_NCHW.is_contiguous(memory_format=layout) for batch in found["resident"])
    half = len(found["resident"]) // 2
    assert not torch.equal(found["resident"][0].mix_weights_N, found["resident"][half].mix_weights_N)
    again = loader_of(split, "resident", channels_last=channels_last, vary=ALL)
    again.seek(half + 2)
    assert_equal(list(again), found["resident"][half + 2 :])


def test_without_settings_a_batch_is_left_alone():
    batch = batch_of(images())
    assert Variation(Vary(), [0.5] * 3, [0.2] * 3, 1, CPU)(batch, {}, channels_last=False) is batch


@pytest.mark.parametrize(
    ("preset", "overrides", "wrong"),
    [
        ("shapes", ["recipe.vary.mixup=0.2"], ["recipe.vary", "segment", "recipe.vary.*"]),
        ("textures", ["recipe.vary.crop_scale=[0.5,1]"], ["recipe.vary", "denoise", "recipe.vary.*"]),
        ("twohead", ["recipe.vary.cutmix=1"], ["recipe.vary", "data.source=rotated_digits"]),
        ("digits", ["recipe.vary.saturation=0.2"], ["recipe.vary.saturation", "data.source=digits"]),
        (
            "cifar10",
            ["recipe.vary.crop_scale=[1,0.5]", "data.root=x"],
            ["recipe.vary.crop_scale", "recipe.vary.crop_scale=[1,0.5]", "[0.5,1]"],
        ),
        ("digits", ["recipe.vary.mixup=-1"], ["recipe.vary.mixup", -1]),
    ],
)
def test_what_cannot_be_varied_so_is_refused_before_any_work(preset, overrides, wrong):
    with refused(*wrong, kind=ConfigError):
        load(preset, overrides)


def test_variations_are_part_of_the_workload():
    plain, other = (load("digits", changes).workload for changes in ([], ["recipe.vary.mixup=0.2"]))
    assert workload_fingerprint(plain, "d") != workload_fingerprint(other, "d")


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
    small = resize_for_epoch(batch, recipe, 0)
    assert small.images_NCHW.shape == (2, 3, 16, 16)
    assert small.images_NCHW.is_contiguous(memory_format=layout)
    torch.testing.assert_close(small.images_NCHW.mean(), images.mean(), atol=0.01, rtol=0)
    assert (small.labels_N is batch.labels_N, small.weight) == (True, 1.5)
    assert resize_for_epoch(batch, recipe, 3) is batch


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
