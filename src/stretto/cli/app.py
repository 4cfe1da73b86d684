"""The commands of ``stretto``, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from stretto.cli.audit import audit_command
from stretto.cli.doctor import doctor_command
from stretto.cli.explain import explain_command
from stretto.cli.export import export_command
from stretto.cli.plan import plan_command
from stretto.cli.resume import resume_command
from stretto.cli.run import run_command
from stretto.cli.train import train_command
from stretto.cli.verify import verify_command

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # plain help starts in half the time, and reads as well
    invoke_without_command=True,
    help="Train any PyTorch model on any number of devices, with the numbers of one device.",
)
app.command("train")(train_command)
app.command("resume")(resume_command)
app.command("run")(run_command)
app.command("verify")(verify_command)
app.command("doctor")(doctor_command)
app.command("plan")(plan_command)
app.command("explain")(explain_command)
app.command("audit")(audit_command)
app.command("export")(export_command)


@app.callback()
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from stretto import __version__

        print(f"stretto {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit
