"""The words of the page that a reader who has not seen one may not know, each in a sentence. Pure.

Owns the sentences; they say what ``docs/protocol.md`` defines.
"""

from __future__ import annotations

from typing import Final

from milesbatch.report.page.html import Html, joined, tag

WORDS: Final = (
    ("step", "one update of the weights by the trainer, from one batch of groups"),
    ("policy version", "the weights after so many steps; version 0 is the model that was started with"),
    ("group", "one prompt with all its samples, which are compared with each other"),
    ("sample, trajectory", "one answer to a prompt, from its first token to its reward; the same as it is recorded"),
    ("fate", "what became of a group: trained on in a step, rejected in a step for a reason, or not decided yet"),
    ("incarnation", "one life of the whole run, from a start by a person or by Slurm to its end; 1 is the first"),
    ("start, attempt", "how often one process was started within an incarnation"),
    (
        "replayed",
        "a recorded step was computed again after a restart, from the last checkpoint on, with the samples that it had:"
        " nothing is decided anew, and the weights are compared with those that were published",
    ),
    (
        "generated again",
        "samples were drawn a second time, because they were lost before they were recorded, or their file was damaged",
    ),
    ("repeated", "a group with two fates: work that was trained on twice. It must be 0, and the audit proves that"),
    ("lost", "a group without a fate that should have one, or whose samples are gone. It must be 0 as well"),
    (
        "lag, staleness",
        "by how many versions the weights that wrote a token were older than those that the step began with",
    ),
    ("keyframe, delta", "a full copy of a policy version; what differs from the version before"),
    (
        "quarantine",
        "a folder of the run to which broken files are moved, with the reason; nothing there is used or deleted",
    ),
)


def glossary() -> Html:
    """A list of words with what they mean here."""
    entries = (joined([tag("dt", word), tag("dd", meaning)]) for word, meaning in WORDS)
    return tag("dl", *entries, _class="facts words")
