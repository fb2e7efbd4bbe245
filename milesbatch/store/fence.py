"""The fence: a process of an earlier incarnation must not commit anything (promise 4, no zombie).

Whoever writes checks, when its data is durable and just before it becomes visible, that the record of the next
incarnation does not exist; its name can be predicted, so no directory listing is relied on. Between that check and the
commit a zombie may still slip through: what it then commits is not in the new incarnation's seal and does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from milesbatch.errors import FencedError
from milesbatch.store.durable import read_optional
from milesbatch.store.layout import RunLayout


@dataclass(frozen=True, slots=True)
class Fence:
    """What a writer of ``incarnation`` calls before each commit."""

    layout: RunLayout
    incarnation: int

    def check(self) -> None:
        """Return only when no newer incarnation is known.

        Raises:
            FencedError: a newer incarnation exists; stop, and write nothing.
            StorageError: it cannot be known; nothing may be written then either.
        """
        # Read, not `exists()`: that takes some errors for absence. NFS may remember for a minute that the name was missing;
        # what is committed meanwhile does not count, as what comes between this check and the commit.
        if read_optional(self.layout.incarnation(self.incarnation + 1)) is not None:
            raise FencedError(
                f"incarnation {self.incarnation} of {self.layout.root} has been taken over by a newer one",
                mend="nothing: the newer incarnation goes on with this run",
            )

    __call__ = check
