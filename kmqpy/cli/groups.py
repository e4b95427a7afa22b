"""Groups of commands, whose error for an unknown command says which ones there are."""

from __future__ import annotations

import click

from kmqpy.core.settings import nearest


class Group(click.Group):
    """A group that suggests the nearest of its commands for an unknown name, or else tells all of them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name; the error for an unknown name has a hint."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            names = self.list_commands(ctx)
            if not args or args[0] in names:
                raise
            group = ctx.command_path
            hint = nearest(args[0], names) or (
                "" if ctx.parent is None else f"; {group} has {', '.join(names)}"
            )
            raise click.UsageError(f"{args[0]!r} is not a command{hint}; see {group} --help", ctx) from error
