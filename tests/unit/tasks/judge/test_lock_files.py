"""Lock files as the ends of a search: how they are read, and their versions side by side."""

import os
import subprocess
import sys

import pytest

from paceline.tasks.errors import InputError
from paceline.tasks.judge.lock_files import Package, install_versions, list_packages, side_with
from paceline.tasks.judge.records import Side
from tests.support.refusals import refused
from tests.support.wheels import write_wheel

LOCK = """
# a comment
--index-url https://example.org/simple
Steady_Package==1.0 \\
    --hash=sha256:00 \\
    --hash=sha256:01
{changed}
elsewhere==3.0 ; sys_platform == "nowhere"
"""


def write(path, changed=""):
    path.write_text(LOCK.format(changed=changed))
    return path


def test_what_differs_between_two_files_is_listed(tmp_path):
    good = write(tmp_path / "good.txt", "tool==1.0  # via x\nold==2.0\nextra[fast]==1.5")
    bad = write(tmp_path / "bad.txt", "Tool==1.1\nnew==0.1\nextra==1.5")
    assert [package.commit.label for package in list_packages(good, bad)] == [
        "new absent -> 0.1",
        "old 2.0 -> absent",
        "tool 1.0 -> 1.1",
    ]


@pytest.mark.parametrize(
    "line", ["tool", "--requirement more.txt", "tool>=1.0", "tool==1.*", "-e .", "tool @ file:///tool", "tool==1.0,<2"]
)
def test_a_line_without_one_version_is_refused(tmp_path, line):
    with refused("--good", *line.split()):
        list_packages(write(tmp_path / "good.txt", line), write(tmp_path / "bad.txt"))


def test_equal_files_and_files_that_are_no_text_are_refused(tmp_path):
    with refused("--bad", tmp_path / "good.txt"):
        list_packages(write(tmp_path / "good.txt"), write(tmp_path / "bad.txt"))
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with refused("--bad", "bad.txt"):
        list_packages(write(tmp_path / "good.txt"), tmp_path / "bad.txt")


MODULE = """
version = "{version}"


def main():
    print(version)
"""


def test_a_side_has_the_versions_of_its_part_of_the_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for name in ("alpha", "beta"):
        for version in ("1.0", "2.0"):
            scripts = f"[console_scripts]\ntell-{name} = {name}:main\n"
            write_wheel(tmp_path, name, version, MODULE.format(version=version), scripts)
    packages = [
        Package(name="alpha", good="1.0", bad="2.0"),
        Package(name="beta", good="1.0", bad="2.0"),
    ]
    command = f"{sys.executable} -c 'import alpha, beta; print(alpha.version, beta.version)' && tell-beta"
    install_versions(packages, command, tmp_path / "versions")
    side = Side(name="good", command=command, directory=str(tmp_path))
    told = {}
    for changed in ((), packages[:1], packages[1:], packages):
        tried = side_with("middle", side, packages, changed, tmp_path / "versions")
        done = subprocess.run(["/bin/sh", "-c", tried.command], capture_output=True, text=True, check=True)
        told[tried.revision] = done.stdout.split()
        assert tried.label.endswith(side.command)
    assert told == {
        "the good versions": ["1.0", "1.0", "1.0"],
        "alpha 1.0 -> 2.0": ["2.0", "1.0", "1.0"],
        "beta 1.0 -> 2.0": ["1.0", "2.0", "2.0"],
        "2 of 2 changes": ["2.0", "2.0", "2.0"],
    }
    with pytest.raises(InputError, match=r"--good: numpy is absent in this file, and .* has it installed"):
        install_versions([Package(name="numpy", good=None, bad="3.0")], command, tmp_path / "versions")
    with pytest.raises(InputError, match=r"--bad: alpha==3\.0 cannot be installed from a wheel"):
        install_versions([Package(name="alpha", good=None, bad="3.0")], command, tmp_path / "versions")
