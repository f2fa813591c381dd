"""Wheels of one module, written by hand."""

import zipfile


def write_wheel(folder, name, version, module, entry_points=""):
    """Write a wheel into a folder."""
    facts = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", module)
        archive.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{facts}/entry_points.txt", entry_points)
        archive.writestr(f"{facts}/RECORD", "")
