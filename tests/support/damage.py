"""Damage that a fault may leave on a disk."""


def damage_newest_set(home):
    """Flip a bit of the prepared set below a home that was used last."""
    newest = max((home / "prepared").glob("[!.]*/manifest.json"), key=lambda path: path.stat().st_mtime_ns)
    largest = max(newest.parent.rglob("*.npy"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-1] ^= 1
    largest.write_bytes(content)
