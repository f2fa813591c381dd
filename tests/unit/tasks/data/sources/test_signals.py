"""Folders of signals and generated tones as sources, their settings, and what is refused before any work."""

import numpy as np
import pytest

from paceline.conf.data import Data, Signal
from paceline.conf.load import ConfigError, load
from paceline.tasks.data.decode.pixels import read_pixels
from paceline.tasks.data.key import describe
from paceline.tasks.data.sources import generated
from paceline.tasks.data.sources import registry as source
from paceline.tasks.model_bundle import digest_of
from paceline.tasks.records.data import ModelFacts
from tests.support.refusals import refused
from tests.support.shards import shards_of
from tests.support.signals import make_sounds, sine, wav


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    root = tmp_path_factory.mktemp("sounds")
    return root, make_sounds(root)


def data_of(root, **changes):
    return Data(source="signals", root=str(root), image_size=32, **changes)


def test_folders_are_listed_as_folders_of_images_are(sounds):
    root, _ = sounds
    (root / "low" / "notes.txt").write_text("not a sample")
    listing = source.list_samples(data_of(root))
    assert listing.class_names == ("high", "low")
    assert listing.num_samples == 48
    assert listing.ignored == {".txt": 1}
    assert (listing.channels, listing.origin.kind, listing.origin.signal) == (1, "signals", Signal())


def test_a_class_without_a_signal_is_told(tmp_path):
    (tmp_path / "low").mkdir()
    (tmp_path / "low" / "a.wav").write_bytes(wav(sine(440)))
    (tmp_path / "high").mkdir()
    (tmp_path / "high" / "a.png").write_bytes(b"")
    with refused("data.root", "high/", ".npy", ".parquet", ".wav"):
        source.list_samples(data_of(tmp_path))


def test_damaged_files_are_listed_with_the_reason(sounds, tmp_path):
    root, damaged = sounds
    data = data_of(root)
    listing = source.list_samples(data)
    records = shards_of(listing, data, tmp_path)
    assert {entry.path for record in records for entry in record.rejected} == damaged
    assert sum(record.num_samples for record in records) == 48 - len(damaged)
    assert np.load(next((tmp_path / "train").glob("*.images.npy"))).shape[1:] == (32, 32, 1)


@pytest.mark.parametrize("name", Signal.model_fields)
def test_every_setting_makes_another_set(sounds, name):
    changed = {
        "kind": "stft",
        "sample_rate": 8_000,
        "clip_seconds": 0.5,
        "window_ms": 16.0,
        "hop_ms": 10.0,
        "num_bands": 20,
        "dynamic_range_db": 60.0,
        "top_db": 0.0,
    }
    plain, other = data_of(sounds[0]), data_of(sounds[0], signal=Signal(**{name: changed[name]}))
    assert describe(plain).key == describe(plain).key
    assert describe(other).key != describe(plain).key
    listing = source.list_samples(other)
    pictures = [
        read_pixels(origin, listing.train[:1], 32, 1).images_NHWC
        for origin in (source.list_samples(plain).origin, listing.origin)
    ]
    assert not np.array_equal(*pictures), "and another picture"


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (["data.source=digits"], ["data.signal", "data.source=digits", "data.signal.*"]),
        (["recipe.augment=flip_shift"], ["recipe.augment", "recipe.augment=flip_shift", "shift"]),
        (["recipe.augment=alternating_flip_shift"], ["recipe.augment", "shift", "none"]),
        (["model.test_views=2"], ["model.test_views", "model.test_views=1"]),
        (["data.signal.window_ms=0.1"], ["data.signal.window_ms", 2, "sample_rate=16000", 4, 8000]),
        (["data.signal.clip_seconds=0.01"], ["data.signal.window_ms", 4, 160]),
        (["data.signal.hop_ms=40"], ["data.signal.hop_ms", 1, 512]),
        (["data.signal.window_ms=499", "data.image_size=64"], ["data.image_size", 64, 17, 7984]),
        (["data.signal.num_bands=33"], ["data.signal.num_bands", 33, 32, "data.image_size"]),
        (["data.signal.clip_seconds=2000"], ["data.signal.clip_seconds", 16777216]),
        (["data.signal.kind=wavelet"], ["data.signal.kind", "wavelet", "log_mel", "stft"]),
        (["data.signal.hop=10"], ["data.signal.hop", "data.signal.hop_ms"]),
        (["data.signal.dynamic_range_db=0"], ["data.signal.dynamic_range_db", 0]),
    ],
)
def test_a_wrong_setting_is_refused_on_one_line(overrides, wrong):
    with refused(*wrong, kind=ConfigError):
        load("tones", ["data.signal.clip_seconds=0.5", *overrides])


def test_tones_are_always_the_same_and_as_loud_as_is_said():
    listing = source.list_samples(Data(source="tones"))
    assert (listing.num_samples, listing.class_names) == (1_800, ("falling", "rising", "steady", "wavering"))
    first = read_pixels(listing.origin, listing.train[:40], 32, 1).images_NHWC
    again = read_pixels(listing.origin, listing.train[10:11], 32, 1).images_NHWC
    assert np.array_equal(first[10], again[0])
    powers = []
    for row in range(20):
        rng = np.random.default_rng((generated._TONES_SEED, row))
        clean = generated._AMPLITUDE * np.sin(generated.phase(generated.TONE_CLASSES[row % 4], rng, Signal()))
        noise = generated.tone(row, Signal()) - clean
        powers.append(10 * np.log10(np.mean(clean**2) / np.mean(noise**2)))
    assert np.mean(powers) == pytest.approx(generated.SNR_DB, abs=0.1)


@pytest.mark.parametrize(("name", "rises"), [("rising", 1), ("falling", -1), ("steady", 0)])
def test_tones_go_where_their_names_say(name, rises):
    for seed in range(20):
        phase_T = generated.phase(name, np.random.default_rng(seed), Signal())
        frequency_T = np.diff(phase_T) / (2 * np.pi) * Signal().sample_rate
        assert 0.1 * 8_000 - 1 <= frequency_T.min() <= frequency_T.max() <= 0.6 * 8_000 + 1
        assert np.sign(round(frequency_T[-1] - frequency_T[0])) == rises


def test_a_model_of_images_keeps_the_digest_that_runs_have_recorded_of_it():
    facts = ModelFacts(
        model=load("digits").model,
        image_shape=(8, 8, 1),
        class_names=("a", "b"),
        mean=(0.5,),
        std=(0.5,),
        fingerprint="0" * 8,
        weights_sha256="0" * 64,
    )
    assert "signal" in facts.model_dump()
    without = facts.model_dump_json(exclude={"signal"})
    assert ModelFacts.model_validate_json(without) == facts
    with_signal = facts.model_copy(update={"signal": Signal()})
    other = facts.model_copy(update={"signal": Signal(kind="stft")})
    assert len({digest_of(facts), digest_of(with_signal), digest_of(other)}) == 3
