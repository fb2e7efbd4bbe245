"""What ``--json`` prints: one JSON document on standard output, and nothing else."""

from __future__ import annotations

import json
import sys


def print_json(document: object) -> None:
    """Write one document, indented, with a newline at its end."""
    json.dump(document, sys.stdout, indent=1, ensure_ascii=False)
    sys.stdout.write("\n")
