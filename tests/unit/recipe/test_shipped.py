"""What comes with milesbatch is found in a checkout and in an installed wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import milesbatch
from milesbatch.recipe.shipped import shipped_recipes, shipped_sites

CHECKOUT = Path(__file__).parents[3]


def test_in_a_checkout_they_are_beside_the_package() -> None:
    assert shipped_recipes() == CHECKOUT / "recipes"
    assert shipped_sites() == CHECKOUT / "slurm" / "sites"


def test_a_wheel_carries_them_to_where_they_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "milesbatch", "recipes", "slurm"):
        (source / name).symlink_to(CHECKOUT / name)
    build = f"from setuptools.build_meta import build_wheel; print(build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    monkeypatch.setattr(milesbatch, "__file__", str(tmp_path / "site-packages" / "milesbatch" / "__init__.py"))
    data = f"{wheel.name.removesuffix('-py3-none-any.whl')}.data/data"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for directory, where in ((shipped_recipes(), "recipes"), (shipped_sites(), "slurm/sites")):
        expected = {
            f"{data}/{directory.relative_to(sys.prefix)}/{path.name}" for path in (CHECKOUT / where).glob("*.yaml")
        }
        assert expected and expected <= names, sorted(name for name in names if ".data" in name)
