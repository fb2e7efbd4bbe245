"""The key of running servers comes from a file, and never from the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from milesbatch.errors import InputError
from milesbatch.recipe.sglang import SGLang
from milesbatch.rollout.servers import key_of


def test_the_file_holds_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    assert key_of(SGLang(key_file=str(tmp_path / "key"))) == "s3cret"
    assert key_of(SGLang()) == ""


@pytest.mark.parametrize("content", [None, b"", b"two words", b"\xff\xfe", b"one\ntwo"])
def test_what_holds_no_key_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"rollout.sglang.key_file: .*key (cannot be read|does not hold a key)"):
        key_of(SGLang(key_file=str(path)))
