"""When a share of changed elements stands out."""

from __future__ import annotations

import pytest

from milesbatch.decisions.densities import FAR_OFF, how_odd, usual_share


def test_few_versions_make_no_usual() -> None:
    assert usual_share([0.01] * 4) is None
    assert usual_share([0.01, 0.5, 0.01, 0.01, 0.0]) == 0.01


@pytest.mark.parametrize(
    ("share", "usual", "found"),
    [
        (0.5, None, None),
        (0.5, 0.0, None),
        (0.01 * FAR_OFF, 0.01, None),
        (0.0501, 0.01, "dense"),
        (0.01 / FAR_OFF, 0.01, None),
        (0.0019, 0.01, "sparse"),
        (0.0, 0.01, "sparse"),
    ],
)
def test_what_stands_out(share: float, usual: float | None, found: str | None) -> None:
    assert how_odd(share, usual) == found
