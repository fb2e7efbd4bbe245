"""Commands that are imported when they are asked for: a start costs what its own command needs, and no more.

Owns how a command's module is found and made part of the command line. Never names a command (``cli/main.py`` has the table).
Invariant: the names are known, and told in their order, without any import; what a command says of itself is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command is: a function, or an application with commands of its own."""

    module: str
    name: str
    example: str = ""
    """Last line of the command's help."""

    def load(self, command_name: str) -> Any:
        """The command, as ``click.Command``."""
        found = getattr(import_module(self.module), self.name)
        if not isinstance(found, typer.Typer):
            app = typer.Typer(add_completion=False)
            app.command(command_name, epilog=f"Example: {self.example}" if self.example else None)(found)
            found = app
        command = typer.main.get_command(found)
        command.name = command_name
        return command


def commands_on_demand(places: dict[str, Place]) -> type[TyperGroup]:
    """A group with these commands, for ``typer.Typer(cls=...)``."""

    class OnDemand(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(places)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in self.commands and cmd_name in places:
                self.commands[cmd_name] = places[cmd_name].load(cmd_name)
            return self.commands.get(cmd_name)

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args and args[0] not in places:
                for name in places:  # the nearest one is looked for among those that are there
                    self.get_command(ctx, name)
            return super().resolve_command(ctx, args)

    return OnDemand
