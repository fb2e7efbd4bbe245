"""The command line knows all its commands, and a start imports only the one that was asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from milesbatch.cli.main import COMMANDS, app
from milesbatch.cli.on_demand import Place, commands_on_demand


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_says_what_it_does(name: str) -> None:
    command = COMMANDS[name].load(name)
    assert command.name == name and command.help
    assert (command.epilog or "").startswith("Example: milesbatch") or hasattr(command, "commands")


def test_help_lists_them_in_their_order() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    places = [text.index(f"│ {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert "Install completion" not in CliRunner().invoke(app, ["traj", "--help"]).stdout


def test_a_slip_of_the_pen_names_the_nearest() -> None:
    ended = CliRunner().invoke(app, ["statsu"])
    assert ended.exit_code == 2 and "Did you mean 'status'?" in ended.output


def test_a_start_imports_only_what_its_command_needs() -> None:
    code = (
        "import sys\nfrom milesbatch.cli.main import app\n"
        "assert not [name for name in ('pyarrow', 'torch', 'milesbatch.recipe') if name in sys.modules]\n"
        "try:\n app(['recipes', 'ls'])\nexcept SystemExit as end:\n assert not end.code\n"
        "assert not [name for name in sys.modules if name.startswith(('milesbatch.controller', 'milesbatch.report'))]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_application_without_commands_of_its_own_is_a_command() -> None:
    outer = typer.Typer(cls=commands_on_demand({"ls": Place("milesbatch.cli.logs", "logs", "one")}))
    outer.callback()(lambda: None)
    text = CliRunner().invoke(outer, ["ls", "--help"]).stdout
    assert "Example: one" in text
