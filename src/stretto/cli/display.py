"""What a running job shows: the resolved plan, the progress, the result, what to try next. Loads rich when needed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from stretto.cli.progress import Progress
from stretto.cli.words import count, duration, held_out, measures, number, plan_lines, size
from stretto.runfolder import plain_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_REDRAW_SECONDS = 0.1
_PLAIN_WIDTH = 120  # of what isn't a terminal
_MANY_SKIPPED = 3
_COMMAND_WIDTH = 60  # a longer command doesn't push the others' comments away


class Display:
    """Listens to a job. On a terminal one line lives below the rest; elsewhere there are plain lines, now and then.

    A quiet one keeps standard output for its command and sends what a task prints, and notes, to standard error.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._console: Console | None = None
        self._live: Live | None = None
        self._drawn = 0.0
        self._progress = Progress()
        self._evaluation: dict[str, Any] | None = None
        self._skipped = 0
        self.summary: dict[str, Any] | None = None
        self.run: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_live()

    @property
    def finished(self) -> bool:
        """Whether the run came to the recipe's end."""
        return self.summary is not None and bool(self.summary["finished"])

    def starting(self, workers: int) -> None:
        """The first line, at once: the imports behind it take seconds."""
        if not self._quiet:
            print(f"starting {workers} worker{'s' if workers > 1 else ''} ...", flush=True)

    def note(self, text: str) -> None:
        """A line to read."""
        self._print(f"note: {text}", "yellow")

    def on_output(self, text: str) -> None:
        """What the lowest rank printed."""
        if self._quiet:
            sys.stderr.write(text)
            sys.stderr.flush()
        elif self._live is not None:
            self._print(text.removesuffix("\n"))
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    def on_event(self, member: str, event: dict[str, Any]) -> None:
        """One event of a worker, or of the host."""
        match event["kind"]:
            case "resolved":
                self._resolved(event)
            case "note":
                self.note(event["text"])
            case "start":
                self._progress.begin(event)
            case "step":
                self._step(event)
            case "evaluation":
                self._evaluated(event)
            case "stopping":
                self._print(f"stopping after step {event['step']:,}, saving ... (Ctrl-C again ends at once)", "yellow")
            case "summary":
                self._summary({key: value for key, value in event.items() if key != "kind"})

    def next_commands(self, commands: list[tuple[str, str]]) -> None:
        """The last lines, where the run came to an end that can be built on."""
        if self._quiet or self.summary is None:
            return
        width = max((len(command) for command, _ in commands if len(command) <= _COMMAND_WIDTH), default=0)
        self._print("\nNext:", "bold")
        for command, why in commands:
            padded, comment = f"  {command:<{width}}", f"  # {why}"
            fits = len(padded) + len(comment) <= self._width()
            self._print_parts(*([(padded, ""), (comment, "dim")] if fits else [(padded.rstrip(), "")]))

    # ---- events

    def _resolved(self, event: dict[str, Any]) -> None:
        self.run = Path(event["run"])
        if self._quiet:
            return
        self._print("")
        for line in plan_lines(event["rows"], event["run"], self._width()):
            origin = f"  ({line.origin})" if line.origin else ""
            self._print_parts((f"{line.section:<10}", "bold"), (line.text, ""), (origin, "dim"))
        self._print("")

    def _step(self, event: dict[str, Any]) -> None:
        self._progress.step(event)
        if event["skipped"]:
            self._skipped += 1
            if self._skipped <= _MANY_SKIPPED:
                rest = "; further ones are only counted" if self._skipped == _MANY_SKIPPED else ""
                self._print(f"step {event['step']:,} was skipped: {event['skipped']}{rest}", "yellow")
        if self._quiet:
            return
        if self._terminal():
            self._draw()
        elif self._progress.line_due(time.monotonic()):
            self._print(self._progress.text())

    def _evaluated(self, event: dict[str, Any]) -> None:
        self._evaluation = event
        if event["step"] < self._progress.steps:  # the last one is told at the end
            self._print(f"step {event['step']:,}  held out: {measures(event['metrics'])}", "cyan")

    def _summary(self, summary: dict[str, Any]) -> None:
        self.summary = summary
        self._end_live()
        if self._quiet:
            import json

            print(json.dumps(plain_json(summary)), flush=True)
            return
        found = self._evaluation
        if found is not None:
            self._print("")
            for place, line in enumerate(held_out(found["metrics"], found["baselines"], found["step"])):
                self._print(line, "bold" if place == 0 else "")
        first, last = self._progress.first_step, summary["steps"]
        ended = f"{last:,} steps" if first == 1 else f"steps {first:,} to {last:,}"
        if not summary["finished"]:
            ended = f"stopped after step {summary['steps']:,} of {self._progress.steps:,}"
        parts = [
            f"{ended} in {duration(summary['wall_seconds'])}",
            f"{count(summary['samples'])} samples{'' if first == 1 else ' in all'}",
            f"last loss {number(summary['final_loss'])}",
            f"peak memory {size(summary['peak_bytes'])} a worker",
        ]
        parts += [f"{summary['skipped_steps']:,} steps skipped"] if summary["skipped_steps"] else []
        self._print("\n" + ", ".join(parts), "green" if summary["finished"] else "yellow")
        if (best := summary["best"]) is not None:
            told = f"best {best['metric']} {number(best['value'])} at step {best['step']:,}"
            self._print(f"{told}: kept in {best['path']}")
        if (pipeline := summary.get("pipeline")) is not None:
            waited, asked = pipeline["bubble"], pipeline["bubble_of_schedule"]
            self._print(f"stages waited for {waited:.0%} of the time; the schedule has them wait for {asked:.0%}")
        self._print(f"everything is in {summary['run']}")

    # ---- the terminal

    def _terminal(self) -> bool:
        return self._ready().is_terminal and not self._ready().is_dumb_terminal

    def _width(self) -> int:
        return self._ready().width

    def _ready(self) -> Console:
        if self._console is None:
            from rich.console import Console

            stream = sys.stderr if self._quiet else sys.stdout
            width = None if stream.isatty() else _PLAIN_WIDTH
            self._console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
        return self._console

    def _print(self, text: str, style: str = "") -> None:
        self._print_parts((text, style))

    def _print_parts(self, *parts: tuple[str, str]) -> None:
        from rich.text import Text

        # Text that came from elsewhere may hold brackets or colours of its own; it is shown as it is.
        line = Text.assemble(*parts, overflow="fold")
        self._ready().print(line, soft_wrap=True)
        self._ready().file.flush()

    def _draw(self) -> None:
        now = time.monotonic()
        last = self._progress.at_end
        if now - self._drawn < _REDRAW_SECONDS and not last:
            return
        self._drawn = now
        line = self._progress.render(self._width())
        if self._live is None:
            from rich.live import Live

            self._live = Live(line, console=self._ready(), auto_refresh=False, redirect_stdout=False)
            self._live.start()
        self._live.update(line, refresh=True)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.update(self._progress.render(self._width(), busy=False), refresh=True)
            self._live.stop()
            self._live = None
