"""The command `kmq`: finds its subcommands, those of other packages too, and prints errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from kmqpy.cli.options import Group, connection_options, given_defaults
from kmqpy.cli.output import PartlyDone, drop_stdout, print_error, replace_closed_streams
from kmqpy.cli.plugins import load, plugins
from kmqpy.core.foreign_names import our_name
from kmqpy.core.settings import keys
from kmqpy.errors import KmqError, Unfinished

_INTERRUPTED = 130
"""The exit code after Ctrl-C; shells use the same."""

_COMMANDS = {
    "queue": ("queues", "Create, look at, change and delete queues."),
    "send": ("messages", "Send messages: arguments, or lines of standard input."),
    "receive": ("messages", "Take messages and print each as a line of JSON."),
    "ack": ("receipts", "Acknowledge messages: they are not redelivered."),
    "nack": ("receipts", "Give messages back: they are redelivered."),
    "extend": ("receipts", "Keep messages for longer (or shorter) than their lease."),
    "dead-letter": ("receipts", "Move messages to the dead letters."),
    "peek": ("state", "Print messages that wait, without taking them."),
    "size": ("state", "Print how many messages wait."),
    "stats": ("state", "Count what a queue holds."),
    "in-flight": ("state", "List messages taken and not acknowledged."),
    "orphans": ("state", "List messages taken and not acknowledged, with their receipts: all, or..."),
    "trace": ("trace", "Show the life of a message: every delivery, redelivery and end."),
    "dlq": ("dead_letters", "Look at dead letters, send them back."),
    "purge": ("queues", "Delete every message of a queue, in flight or not."),
    "doctor": ("state", "Check queues and say what to do."),
    "gateway": ("gateway", "Serve queues over HTTP to clients of EmoDB and SQS, until SIGTERM or Ctrl-C."),
    "console": ("gateway", "Show queues of any storage in a browser on this machine, until Ctrl-C."),
    "key": ("gateway", "Make, list, revoke and rotate the keys of a gateway's clients."),
    "pipeline": ("spark", "Process a queue's messages with Spark, and write the results."),
    "spark-state": ("spark", "Keep the state of each message as a table, by Spark."),
    "spark-jars": ("spark", "Print the jars that Spark needs, as spark-submit takes them."),
    "sql": ("sql", "For queues in a SQL database."),
    "zookeeper": ("zookeeper", "Queues stored in ZooKeeper: those of kmqpy.zookeeper, of Curator and kazoo."),
    "dev": ("dev", "Run Kafka, ZooKeeper and databases on this machine."),
    "demo": ("demo", "Try it all out: consumers fail, a tracker is killed."),
}
"""Our commands in the order in which users need them: the module of each, and its short help. A module is
imported when its command is called: all together take five times as long as click itself."""

_KNOWN_HELP = {
    "tracker": "Redeliver what is not acknowledged in time.",
    "spark-tracker": "Run trackers on the executors of a Spark cluster.",
}
"""The same of commands in the package `tracker`."""


class Root(Group):
    """Lists kmqpy's commands, then those of other packages, and imports each when it is called."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, without importing them."""
        known = {**_KNOWN_HELP, **{name: text for name, (_, text) in _COMMANDS.items()}}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, known.get(name, "(of another package)")) for name in self.list_commands(ctx)]
            )

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands: kmqpy's in their order, then those of other packages."""
        return [*_COMMANDS, *(name for name in sorted(plugins()) if name not in _COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name: kmqpy's, or that of another package, which is imported now."""
        if cmd_name not in self.commands and cmd_name in _COMMANDS:
            module = import_module(f"kmqpy.cli.{_COMMANDS[cmd_name][0]}")
            self.add_command(getattr(module, cmd_name.replace("-", "_")), cmd_name)
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in plugins():
            return own
        try:
            found = load(plugins()[cmd_name])
        except (ImportError, AttributeError) as error:
            return _broken(cmd_name, error)
        # Options that stand before the command's name hold for the command, too.
        ctx.default_map = {**(ctx.default_map or {}), cmd_name: given_defaults(ctx)}
        return found


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Addresses: options, KMQ_BOOTSTRAP and KMQ_ZOOKEEPER, or a file (--config, KMQ_CONFIG); "
    "KMQ_QUEUE_URL for another storage, and for a url with a password.",
)
@click.version_option(package_name="kmqpy", prog_name="kmq", message="%(prog)s %(version)s")
@connection_options
def kmq() -> None:
    """Message queues on Apache Kafka: acknowledge each message, redeliver what was not.

    \b
    Try it on this machine:
      kmq dev up                             a Kafka and a ZooKeeper (prints their addresses)
      kmq tracker                            what redelivers; run two or more
      kmq queue create jobs --partitions 4
      echo "hello" | kmq send jobs
      kmq receive jobs --lease 30s           prints JSON with a receipt
      kmq ack RECEIPT                        from any machine
      kmq stats jobs

    \b
    Most commands work with queues of other storages, too:
      kmq --queue-url sqlite:///jobs.db queue create jobs
    """


def run(args: Sequence[str]) -> int:
    """Run one command line; returns the exit code and prints errors as one line."""
    replace_closed_streams()
    try:
        result: Any = kmq.main(list(args), prog_name="kmq", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):  # Ctrl-C, or no answer to a question
        return _INTERRUPTED
    except BrokenPipeError:
        drop_stdout()
        return 0
    except SystemExit as stopped:
        if type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):  # so click reacts to a broken pipe
            drop_stdout()
            return 0
        return stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            error = _with_our_option(error)
        if type(error).__name__ == "NoArgsIsHelpError":
            click.echo(error.format_message(), err=True)
            return 2
        return _failed(_with_help(error), code=1 if isinstance(error, PartlyDone) else 2)
    except Unfinished as error:
        return _failed(str(error), code=1)
    except UnicodeError as error:
        return _failed(f"not UTF-8: {error}")
    except KmqError as error:
        return _failed(str(error) or type(error).__name__)
    except OSError as error:
        return _failed(f"{error.filename or 'system'}: {error.strerror or error}")
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()
    return result if isinstance(result, int) else 0


def _with_our_option(error: click.NoSuchOption) -> click.UsageError:
    """The error, with the option that other queues call so."""
    options = error.ctx.command.params if error.ctx is not None else []
    names = [name for one in options for name in one.opts if name.startswith("--")]
    ours = our_name(error.option_name, names)
    if ours is None and "--set" in names:
        from kmqpy.kafka.settings import QueueSettings
        from kmqpy.storages.settings import StoredQueueSettings

        setting = our_name(error.option_name, keys(StoredQueueSettings).keys() - {"name"})
        elsewhere = "" if setting in keys(QueueSettings) else " with --queue-url"
        ours = setting and f"--set {setting}=…{elsewhere}"
    if ours is None:
        return error
    return click.UsageError(f"No such option {error.option_name!r}; did you mean {ours}?", error.ctx)


def _with_help(error: click.ClickException) -> str:
    """The text of the error; for missing and unknown options it also names the command's help."""
    text = error.format_message()
    about_options = (click.MissingParameter, click.NoSuchOption, click.BadOptionUsage)
    if not isinstance(error, about_options) or error.ctx is None:
        return text
    return f"{text.removesuffix('.')}; see {error.ctx.command_path} --help"


def _failed(text: str, code: int = 2) -> int:
    print_error(text)
    return code


def _broken(name: str, error: Exception) -> click.Command:
    """Return a command that stands for one that can't be loaded: called, it fails with the reason."""

    @click.command(
        name, short_help=f"(can't be loaded: {error})", context_settings={"ignore_unknown_options": True}
    )
    @click.argument("rest", nargs=-1)
    def broken(rest: tuple[str, ...]) -> None:  # noqa: ARG001
        raise click.ClickException(f"command {name!r} can't be loaded: {error}")

    return broken
