"""The key of a preparation: the sha256 of everything that decides on its result."""

import hashlib
import json
from importlib import metadata

from paceline.conf.data import Data
from paceline.tasks.data.decode.transform import PHOTOGRAPH_VERSION, TRANSFORM_VERSION
from paceline.tasks.data.listing import Listing, SampleListing
from paceline.tasks.data.prepare.chunks import image_bytes
from paceline.tasks.data.sources import registry

TRANSFORM = f"{TRANSFORM_VERSION}.{PHOTOGRAPH_VERSION}"
FORMAT_VERSION = 2  # version of the files and the manifest of a prepared set


def decisive_versions(listing: SampleListing, data: Data) -> dict[str, str]:
    """Versions of the packages and decoders that decide on the content of a set, by their names."""
    spec = registry.spec_of(listing.origin)
    libraries = ("pillow", "simplejpeg", "numpy", *spec.libraries(listing), *(("torch",) if data.keeps_aspect else ()))
    versions = {library: metadata.version(library).split("+")[0] for library in libraries}
    decoders = registry.DECODERS.keys() & spec.key(listing.origin).keys()
    return versions | {name: registry.DECODERS[name] for name in sorted(decoders)} | {"transform": TRANSFORM}


def preparation_key(listing: SampleListing, data: Data) -> str:
    """Hash of listing, transform, libraries; `max_rejected_fraction` decides on the use of a set, not its content."""
    origin = listing.origin
    spec = registry.spec_of(origin)
    libraries = ("pillow", "simplejpeg", "numpy", *spec.libraries(listing))
    inputs = {
        "format": FORMAT_VERSION,
        "transform": TRANSFORM_VERSION,
        "listing": listing.sha256,
        "image_size": data.image_size,
        "channels": listing.channels + listing.num_planes,
        "test_fraction": data.test_fraction,
        "validation_fraction": data.validation_fraction,
        "versions": {library: metadata.version(library) for library in libraries},
        **spec.key(origin),
    }
    if data.keeps_aspect:
        torch = metadata.version("torch").split("+")[0]  # whose kernels scale them
        inputs |= {"stored_size": data.stored_side, "photographs": [PHOTOGRAPH_VERSION, torch]}
    if data.storage == "jpeg":
        inputs["jpeg"] = data.jpeg_quality
    if origin.fit != "scale":
        inputs["fit"] = origin.fit
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def describe(data: Data) -> Listing:
    """List a source and summarise it; errors as in `registry.list_samples`."""
    listing = registry.list_samples(data)
    storages = ("raw", "jpeg") if data.storage == "auto" and data.allows_jpeg else (data.storage,)
    forms = [data.model_copy(update={"storage": storage}) for storage in storages]
    channels = listing.channels + listing.num_planes
    return Listing(
        key=preparation_key(listing, data),
        class_names=listing.class_names,
        num_train=len(listing.train),
        num_validation=len(listing.validation),
        num_test=len(listing.test),
        channels=listing.channels,
        target_names=listing.target_names,
        ignored=listing.ignored,
        sizes={preparation_key(listing, form): listing.num_samples * image_bytes(form, channels) for form in forms},
    )
