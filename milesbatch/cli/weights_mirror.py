"""``milesbatch weights push`` and ``pull``: policy versions by way of an object store, for rollout fleets elsewhere.

Owns the words on the screen, the opening of stores and the waiting for new versions; never moves payload itself. Invariant:
with ``--json`` standard output is one JSON document and nothing else. Imports without torch. The page behind it is
``docs/storage.md``.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from milesbatch.cli.documents import print_json
from milesbatch.cli.following import LOOK_S, End, looks
from milesbatch.cli.outputs import check_outputs
from milesbatch.cli.runs import find_run
from milesbatch.errors import EXIT_NOT_WELL, CorruptArtefactError, InputError
from milesbatch.report.page.words import many, size
from milesbatch.store.object_store import ObjectStore
from milesbatch.store.port import ArtefactStore
from milesbatch.store.posix_store import PosixStore
from milesbatch.weights.mirror_pull import Pull, Pulled
from milesbatch.weights.mirror_push import Push, Pushed

_LIST_S = 30.0

UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix, or a directory.")]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint", metavar="URL", help="Server of the object store, when it is not AWS.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def push(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")],
    url: UrlArgument,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with what comes, until the run is over.")
    ] = False,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy committed policy versions to an object store; what is there is compared and never rewritten.

    Give the same command to go on. Exit code 1 when a version is damaged and was left out; with --follow else that of the run's
    end: 0 finished, 1 failed, 75 stopped.
    """
    layout = find_run(run)
    check_outputs(None if "://" in url else Path(url).parent)  # the store itself has a run's form
    job = Push(layout, open_store(url, endpoint))
    done: list[Pushed] = []
    end = End()
    try:
        job.begin()
        for one in (one for _ in looks(layout, follow=follow, end=end) for one in job.versions()):
            done.append(one)
            if one.damage:
                print(f"version {one.version} is left out: {one.damage}", file=sys.stderr, flush=True)
            elif not as_json and not one.was_there:
                print(f"version {one.version}: {one.kind}, {size(one.bytes)}", flush=True)
    except KeyboardInterrupt:
        pass  # it ends the following; what was pushed stays
    whole = [one for one in done if not one.damage]
    left_out = sorted({one.version for one in done if one.damage} - {one.version for one in whole})
    new = [one for one in whole if not one.was_there]
    if as_json:
        rows = [{"version": one.version, "kind": one.kind, "bytes": one.bytes} for one in new]
        versions = sorted(one.version for one in whole)
        print_json({"url": url, "pushed": rows, "versions": versions, "left_out": left_out})
    else:
        already = len(whole) - len(new)
        print(f"{many(len(new), 'version')} pushed to {url}, {already} already there")
    code = end.tell()
    if left_out or code:
        raise typer.Exit(EXIT_NOT_WELL if left_out else code)


def pull(
    url: UrlArgument,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="New or empty directory, or one of an earlier pull.")
    ],
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with what comes, until --version is there, or Ctrl-C.")
    ] = False,
    version: Annotated[int | None, typer.Option("--version", min=0, help="Policy version; else the newest.")] = None,
    limit_gib: Annotated[
        float | None,
        typer.Option("--limit", min=0.0, metavar="GIB", help="Above it, drop what the newest keyframe makes needless."),
    ] = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a policy version into a local directory that `weights ls`, `verify` and `materialize` take for a run.

    Only what that version needs and DIR lacks is fetched; each file is compared with its digest before it is visible.
    """
    check_outputs(directory.parent)  # the directory itself has a run's form, from an earlier pull
    store = open_store(url, endpoint)
    job = Pull(store, directory)
    done: list[Pulled] = []
    if not follow:
        job.require(version)
    try:
        with job.taken():
            for one in _pulled(job, version, follow):
                done.append(one)
                for damage in one.damage:
                    print(f"taken another way: {damage}", file=sys.stderr, flush=True)
                if not as_json:
                    words = f"{many(one.files, 'file')}, {size(one.bytes)} fetched"
                    print(f"version {one.version} ({one.digest}) is in {directory}: {words}", flush=True)
                dropped = () if limit_gib is None else job.shrink(one.version, int(limit_gib * (1 << 30)))
                if dropped and not as_json:
                    print(f"dropped from {directory}: versions {dropped[-1]} to {dropped[0]}", flush=True)
    except KeyboardInterrupt:
        pass  # it ends the following; what was pulled stays
    if as_json:
        rows = [dataclasses.asdict(one) for one in done]
        print_json({"url": url, "directory": str(directory), "pulled": rows})


def _pulled(job: Pull, wanted: int | None, follow: bool) -> Iterator[Pulled]:
    if not follow:
        newest = job.newest() if wanted is None else wanted
        if newest is None:
            raise InputError("no policy version was pushed there yet", mend="wait for the first one with --follow")
        yield job.bring(newest)
        return
    tried: int | None = None
    next_s = 0.0
    while True:
        look = time.monotonic() >= next_s  # names can be predicted, but retired versions were perhaps never pushed
        next_s = time.monotonic() + _LIST_S if look else next_s
        newest = job.newest(tried, look=look)
        if newest is not None and wanted is not None:
            newest = min(newest, wanted)
        if newest is not None and newest != tried:
            tried = newest
            try:
                yield job.bring(newest)
            except CorruptArtefactError as error:
                if newest == wanted:
                    raise
                print(f"version {newest} is passed over: {error.what}", file=sys.stderr, flush=True)
            if newest == wanted:
                return
        time.sleep(LOOK_S)


def open_store(url: str, endpoint: str | None) -> ArtefactStore:
    """The store at ``url``.

    Raises:
        InputError: it is not a URL that can be used, or the packages for object stores are missing.
    """
    if "://" not in url:
        if endpoint is not None:
            raise InputError(
                f"--endpoint {endpoint} with the directory {url}", mend="give s3://bucket/prefix, or no --endpoint"
            )
        return PosixStore(Path(url))
    return ObjectStore(url, {} if endpoint is None else {"client_kwargs": {"endpoint_url": endpoint}})
