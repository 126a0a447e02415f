"""The application `pdmesh`: commands, and errors as one line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import typer
from typer.exceptions import TyperException

from engine_core.types.errors import ConfigError, PdmeshError
from services.config import quiet_grpc

quiet_grpc()  # counts only before grpc is imported

from services.cli import bench, drain, explain, health, model, role, serve, single, status, top  # noqa: E402
from services.cli.doctor import command as doctor  # noqa: E402

app = typer.Typer(
    help="LLM serving with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its tables cut option names short
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
serve.add_command_to(app)
single.add_commands(app)
status.add_command_to(app)
top.add_command_to(app)
doctor.add_command_to(app)
explain.add_command_to(app)
drain.add_command_to(app)
role.add_command_to(app)
model.add_commands(app)
bench.add_commands(app)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(f"pdmesh {installed('pdmesh')}")


@app.command(
    "health", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def ask_health(context: typer.Context) -> int:
    """Ask one process whether it serves: 0 when it does, 1 with the reason when not."""
    return health.main(context.args)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; returns its exit code. Errors that the user can mend are one line on stderr."""
    if list(arguments) == ["--version"]:
        arguments = ["version"]
    try:
        return int(app(args=list(arguments), prog_name="pdmesh", standalone_mode=False) or 0)
    except TyperException as exc:
        message, code = _message(exc), getattr(exc, "exit_code", 2)
    except ConfigError as exc:
        message, code = exc.message, 2
    except PdmeshError as exc:
        message, code = exc.message, 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    print(f"pdmesh: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _message(exc: TyperException) -> str:
    form = getattr(exc, "format_message", None)
    return str(form() if form is not None else exc)


def main() -> None:
    """Entry point of the command `pdmesh`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
