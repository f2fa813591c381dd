"""A source of Paceline is an entry in two tables: one of the settings, one of the data stage."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from paceline.conf import plugins
from paceline.conf.data import Data
from paceline.tasks.data import key
from paceline.tasks.data.listing import Origin
from paceline.tasks.data.prepare import chunks
from paceline.tasks.data.sources import registry


def test_both_tables_name_the_same_sources():
    assert tuple(plugins.EMBEDDED_SOURCES) == tuple(registry.SOURCES) == get_args(plugins.Source)


def test_two_entries_make_a_source(monkeypatch):
    """Everything else (help, checks, key, chunks, reading) follows from them."""
    monkeypatch.setitem(plugins.EMBEDDED_SOURCES, "waves", plugins.EMBEDDED_SOURCES["textures"])
    spec = registry.SourceSpec(
        "waves",
        lambda data: replace(registry.SOURCES["textures"].list_samples(data), origin=Origin("waves")),
        registry.SOURCES["textures"].read,
        libraries=lambda listing: ("scipy",),
        key=lambda origin: {"waves": 1},
        has_rows=True,
    )
    monkeypatch.setitem(registry.SOURCES, "waves", spec)
    monkeypatch.setitem(registry._BY_KIND, "waves", spec)
    data = Data(source="waves", image_size=16)
    listing = registry.list_samples(data)
    assert key.describe(data).num_train == len(listing.train)
    assert key.preparation_key(listing, data) != key.describe(Data(source="textures", image_size=16)).key
    assert chunks.chunks_of(listing.train, listing.origin, 256) == 1
    (item,) = registry.spec_of(listing.origin).read(listing.origin, listing.train[:1], 16)
    assert item.picture.shape == (16, 16, 1)
