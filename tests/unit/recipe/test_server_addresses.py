"""Addresses of SGLang servers that run already: one spelling of each, and nothing that is no address."""

from __future__ import annotations

import pytest

from milesbatch.recipe.sglang import server_addresses


def test_one_spelling_of_each() -> None:
    given = ("HTTP://LocalHost:1/", "https://node7", "http://[::1]:30000", "http://10.0.0.1:080")
    assert server_addresses(given) == (
        "http://localhost:1",
        "https://node7",
        "http://[::1]:30000",
        "http://10.0.0.1",
    )


@pytest.mark.parametrize(
    "other", ["HTTP://LOCALHOST:1", "http://localhost:1/", "http://localhost:01", "http://localhost:1//"]
)
def test_two_spellings_of_one_address_are_one_server(other: str) -> None:
    with pytest.raises(ValueError, match="http://localhost:1 is there twice"):
        server_addresses(("http://localhost:1", "http://node7:1", other))


@pytest.mark.parametrize(
    "url",
    [
        "", "node7:30000", "ftp://node7:1", "http://", "http://:30000", "http://node7:99999", "http://node7:0",
        "http://node7:-1", "http://node7:x", "http://me:word@node7:1", "http://@node7:1", "http://node7:1/v1",
        "http://node7:1?a=b", "http://node7:1?", "http://node7:1#a", "http://node7:1#", " http://node7:1",
        "http://node7:1 ", "http://no de7:1", "http://node7\n:1", "http://node7:1\t", "http://[::1:1", "http://nodé7:1",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_by_its_name(url: str) -> None:
    with pytest.raises(ValueError, match="is not the address of a server such as http://node7:30000") as caught:
        server_addresses((url,))
    assert repr(url) in str(caught.value)
