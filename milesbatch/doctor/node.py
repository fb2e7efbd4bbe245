"""One of the two nodes of the doctor's job: ``python -m milesbatch.doctor.node PART DIRECTORY``.

``examiner`` and ``servant`` find each other through the directory and a TCP connection; what was measured becomes
``DIRECTORY/result-PART.json``. Invariant: it ends within its time, whatever the other one does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from milesbatch.doctor.examiner import Examiner
from milesbatch.doctor.facts import node_name, own_addresses
from milesbatch.doctor.link import LinkError, accept_offer, offer
from milesbatch.doctor.servant import Servant
from milesbatch.errors import MilesbatchError
from milesbatch.store.durable import publish_file

MEET_S = 70.0
"""For how long one node waits for the other: its file may be seen late."""
EXAMINE_S = 100.0
LONGEST_S = 175.0
PARTS = ("examiner", "servant")


def result_file(directory: Path, part: str) -> Path:
    return directory / f"result-{part}.json"


def examine(directory: Path) -> dict[str, Any]:
    """What the first node measured."""
    addresses = own_addresses()
    with offer(directory, addresses, MEET_S) as link:
        return {"addresses": addresses, **Examiner(directory, link, EXAMINE_S).examine()}


def serve(directory: Path) -> dict[str, Any]:
    """Which address of the first node worked."""
    with accept_offer(directory, MEET_S) as link:
        Servant(directory, link.address).serve(link)
        return {"address": link.address}


def main(arguments: list[str]) -> int:
    """0 when the result was written, whatever it says."""
    part, directory = arguments[0], Path(arguments[1])
    watchdog = threading.Timer(LONGEST_S, _give_up)
    watchdog.daemon = True
    watchdog.start()
    body: dict[str, Any] = {"node": node_name()}
    try:
        body |= examine(directory) if part == "examiner" else serve(directory)
    except (LinkError, MilesbatchError, OSError) as error:
        body["error"] = str(error)
    publish_file(result_file(directory, part), json.dumps(body).encode())
    return 0


def _give_up() -> None:
    print("error: no end in sight; the doctor's node gives up", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
