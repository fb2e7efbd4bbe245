"""``milesbatch plan``: what a recipe needs and moves, before it is queued.

Owns the words on the screen; the numbers are made in :mod:`milesbatch.plan`. The page behind it is ``docs/plan.md``.

Works on a login node: no torch, nothing is downloaded, nothing is started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from milesbatch.cli.documents import print_json
from milesbatch.cli.recipes import find_recipe
from milesbatch.cli.runs import find_run
from milesbatch.cluster.context import site_directories
from milesbatch.errors import EXIT_NOT_WELL, InputError
from milesbatch.plan.measuring import measure
from milesbatch.plan.model_size import model_size
from milesbatch.plan.planning import Plan, make_plan
from milesbatch.plan.traffic import Speeds
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.site import load_site


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a known recipe.")],
    site: Annotated[
        str | None, typer.Option("--site", help="Site name or file: limits and memory of nodes.", show_default=False)
    ] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change a field: `--set trainer.ranks=4`.")] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="An earlier run of the same model: its deltas and steps.")
    ] = None,
    filesystem_gb_s: Annotated[
        float | None,
        typer.Option(
            "--filesystem-gb-s", min=1e-6, max=1e6, help="Bandwidth of the run directory in GB/s (`doctor` shows it)."
        ),
    ] = None,
    network_gb_s: Annotated[
        float | None,
        typer.Option("--network-gb-s", min=1e-6, max=1e6, help="Bandwidth between trainer and workers in GB/s."),
    ] = None,
    gpu_memory_gib: Annotated[
        float | None, typer.Option("--gpu-memory-gib", min=0.1, max=1e6, help="Memory of one GPU.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Nodes, ranks, memory and traffic of a recipe, and which weights.transport pays. Exit code 1 when it cannot fit."""
    wanted = load_recipe(recipe if recipe.exists() else find_recipe(str(recipe)), changes or [])
    if gpu_memory_gib is not None and not (wanted.slurm.trainer.gpus_per_task or wanted.slurm.rollout.gpus_per_task):
        raise InputError(
            f"--gpu-memory-gib {gpu_memory_gib} for a recipe that asks for no GPU",
            mend="set slurm.trainer.gpus_per_task or slurm.rollout.gpus_per_task, or leave the option out",
        )
    size = model_size(wanted)
    measured = None if run is None else measure(find_run(run), wanted, size)
    speeds = Speeds(*(None if value is None else value * 1e9 for value in (filesystem_gb_s, network_gb_s)))
    found = make_plan(
        wanted, size, None if site is None else load_site(site, site_directories()), measured, speeds, gpu_memory_gib
    )
    if as_json:
        print_json(found.to_json())
    else:
        _print(found, wanted.weights.transport)
    if not found.fits:
        raise typer.Exit(EXIT_NOT_WELL)


def _print(found: Plan, transport: str) -> None:
    console = Console(highlight=False, soft_wrap=True)
    size = found.size
    console.print(f"model: {size.parameters:,} parameters ({size.counted_from}), {size.layers} layers")
    for name, role in (("trainer", found.trainer), ("rollout", found.rollout)):
        where = "GPU" if role.gpus_per_process else "CPU"
        console.print(f"{name}: {role.processes} processes on {role.nodes} nodes, {found.layout[name]}, on the {where}")
        table = Table("memory of one process", "MB", box=None, pad_edge=False)
        table.columns[1].justify = "right"
        for part, num_bytes in (*role.device.items(), *((f"host: {p}", b) for p, b in role.host.items())):
            if num_bytes:
                table.add_row(part, f"{num_bytes / 1e6:,.1f}")
        console.print(table)
    table = Table("bytes of a step across the filesystem (estimated)", "MB", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for part, num_bytes in found.bytes_per_step.items():
        table.add_row(part, f"{num_bytes / 1e6:,.1f}")
    console.print(table)
    step = "not known: give --run" if found.step_s is None else f"{found.step_s:.2f} s (measured)"
    console.print(f"step: {step}; lag: {found.lag:.0f} versions")
    console.print(
        f"weights.transport: {found.transport.recommended} (the recipe says {transport}): {found.transport.reason}"
    )
    for problem in found.problems:
        console.print(f"does not fit: {problem}")
    if found.fits:
        console.print("fits, as far as limits are known")
