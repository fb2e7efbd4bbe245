"""``milesbatch weights export`` and ``import``: policy versions for other tools, and theirs as model directories.

Owns the words on the screen and the waiting for new versions; never reads payload itself. Invariant: with ``--json`` standard
output is one JSON document and nothing else. Imports without torch. The page behind it is ``docs/format-miles.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from milesbatch.cli.documents import print_json
from milesbatch.cli.following import End, looks
from milesbatch.cli.names_in_files import refuse_other_names
from milesbatch.cli.outputs import check_outputs
from milesbatch.cli.runs import find_run
from milesbatch.errors import EXIT_NOT_WELL, InputError, UsageError
from milesbatch.report.page.words import many, size
from milesbatch.store.layout import RunLayout
from milesbatch.store.survey import Seals, read_incarnations
from milesbatch.weights.digest import weights_digest
from milesbatch.weights.materialize import require_room_for, write_model_like
from milesbatch.weights.miles_export import Exported, Exporter
from milesbatch.weights.miles_import import rebuild_published, source_of
from milesbatch.weights.miles_layout import published_versions
from milesbatch.weights.reader import AcceptManifest

_MOST_NAMES = 5


class Layout(StrEnum):
    """Layouts that other tools read."""

    MILES = "miles"


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Directory of versions; one that exists is continued.")
    ],
    layout: Annotated[
        Layout, typer.Option("--layout", help="miles: as Miles publishes, and SGLang's /pull_weights reads.")
    ] = Layout.MILES,
    first: Annotated[
        int | None, typer.Option("--from", min=0, help="First version; else what follows the newest in DIR.")
    ] = None,
    last: Annotated[int | None, typer.Option("--to", min=0, help="Last version; else the newest there is.")] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with what comes, until --to or the end of the run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Publish policy versions in a layout that other tools follow: a full checkpoint, then a delta for each version.

    A version appears whole or not at all, and is never written again: give the same command to go on. Exit code 1 when one is
    damaged and was left out; with --follow else that of the run's end: 0 finished, 1 failed, 75 stopped.
    """
    if first is not None and last is not None and first > last:
        raise UsageError(f"--from {first} is after --to {last}", mend="give a range that begins before it ends")
    run_layout = find_run(run)
    check_outputs(output)
    refuse_other_names(run_layout, "an export")
    exporter = Exporter(run_layout, output, lambda: _counting(run_layout))
    made: list[Exported] = []
    end, told = End(), Told(exporter)
    try:
        for one in _exported(run_layout, exporter, first, last, follow, end, told):
            made.append(one)
            if not as_json:
                why = f" ({one.because})" if one.because else ""
                print(
                    f"version {one.version}: {one.kind}, {many(one.changed, 'tensor')}, {size(one.bytes)}{why}",
                    flush=True,
                )
    except KeyboardInterrupt:
        pass  # it ends the following; what was published stays
    told.gaps()
    there = exporter.versions
    if not there and not exporter.left_out:
        raise InputError(f"{run_layout.root} has no policy version to export", mend="see `milesbatch weights ls`")
    if as_json:
        versions = [
            {
                "version": one.version,
                "kind": one.kind,
                "bytes": one.bytes,
                "tensors": one.changed,
                "path": str(one.path),
            }
            for one in made
        ]
        body = {"layout": layout.value, "directory": str(output), "exported": versions, "versions": there}
        print_json({**body, "left_out": sorted(exporter.left_out)})
    else:
        newly = many(len(made), "version") if made else "nothing new"
        held = f", {there[0]} to {there[-1]}" if there else ""
        print(f"{newly}; {output} holds {many(len(there), 'policy version')}{held}")
    code = end.tell()
    if exporter.left_out or exporter.gaps or code:
        raise typer.Exit(EXIT_NOT_WELL if exporter.left_out or exporter.gaps else code)


class Told:
    """What was said on standard error, so that it is said once."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter, self._said = exporter, 0

    def left_out(self) -> None:
        for version, what in list(self._exporter.left_out.items())[self._said :]:
            print(f"version {version} is left out: {what}", file=sys.stderr, flush=True)
        self._said = len(self._exporter.left_out)

    def gaps(self) -> None:
        if self._exporter.gaps:
            words = ", ".join(str(gap) for gap in self._exporter.gaps[:_MOST_NAMES])
            what = "are not in the directory and cannot be published again: readers cannot pass them"
            print(f"versions {words} {what}; the next version will be a full copy", file=sys.stderr, flush=True)


def _counting(layout: RunLayout) -> AcceptManifest:
    return Seals(read_incarnations(layout)).accept_weights


def _exported(
    layout: RunLayout,
    exporter: Exporter,
    first: int | None,
    last: int | None,
    follow: bool,
    end: End,
    told: Told,
) -> Iterator[Exported]:
    """Versions as they are published; with ``follow`` until ``last`` is there, or the run is over and all of it is."""
    if first is not None and not follow and (one := exporter.export(first)) is not None:
        yield one  # or the error that says why just this one cannot be had
    for _ in looks(layout, follow=follow, end=end):
        for version in exporter.due(first, last):
            if (one := exporter.export_or_leave_out(version)) is not None:
                yield one
            told.left_out()
        told.left_out()
        newest = exporter.last
        if last is not None and (last in exporter.left_out or (newest is not None and newest >= last)):
            return
        if newest is not None and first is not None and newest >= first:
            first = None  # from here on, what follows the newest


def import_version(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory that holds weight_v000001 and so on.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="New or empty directory to write.")],
    version: Annotated[int | None, typer.Option("--version", min=0, help="Version; else the newest.")] = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", metavar="MODEL", help="Version 0, where DIR lacks it: what the engines began with."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Rebuild a version that Miles (or `weights export`) published, check it, and write it as a model directory."""
    check_outputs(output)
    there = published_versions(directory)
    if version is None:
        if not there:
            raise InputError(f"{directory} holds no versions", mend="give the directory that holds weight_v000001")
        version = there[-1]
    if base is not None and not base.is_dir():
        raise InputError(f"--base {base} is not a directory", mend="give a model directory in Hugging Face's layout")
    require_room_for(source_of(directory, version, base), output)
    rebuilt = rebuild_published(directory, version, base)
    write_model_like(rebuilt.source, rebuilt.tensors, output)
    digest = weights_digest((name, t.dtype, t.shape, t.digest) for name, t in rebuilt.tensors.items())
    if as_json:
        unproven = list(rebuilt.unproven)
        body = {
            "version": version,
            "digest": digest,
            "deltas": rebuilt.deltas,
            "unproven": unproven,
            "path": str(output),
        }
        print_json(body)
        return
    console = Console()
    how = f"{many(rebuilt.deltas, 'delta')} on {rebuilt.source}"
    console.print(f"version {version} ({digest}; {how}) written to {output}", soft_wrap=True, markup=False)
    if rebuilt.unproven:
        names = ", ".join(rebuilt.unproven[:_MOST_NAMES]) + (", ..." if len(rebuilt.unproven) > _MOST_NAMES else "")
        words = f"no checksum covers {many(len(rebuilt.unproven), 'tensor')} of the full checkpoint: {names}"
        console.print(words, soft_wrap=True, markup=False)
