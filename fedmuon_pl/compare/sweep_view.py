"""What a sweep shows while it runs."""

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .execute import Event, Outcome
from .plan import Run

__all__ = ["SweepView", "duration", "show_failures"]

_MARKS = {
    "started": ("▸", "cyan"),
    "progress": ("▸", "cyan"),
    "done": ("✓", "green"),
    "skipped": ("✓", "dim"),
    "failed": ("✗", "red"),
    "stopped": ("■", "yellow"),
}


class SweepView:
    """Shows a sweep: a line for each run that starts or ends, and in a terminal those that run.

    Where there is no terminal, a run says every ``seconds`` how far it is.
    """

    def __init__(
        self,
        console: Console,
        runs: Sequence[Run],
        tag: str,
        total: int | None = None,
        seconds: float = 60.0,
    ) -> None:
        self._console, self._tag = console, tag
        self._total = len(runs) if total is None else total
        self._ended = self._failed = 0
        self._width = 0
        self._running: dict[str, Event] = {}
        self._since: dict[str, float] = {}
        self._said: dict[str, float] = {}
        self._seconds = seconds
        self._rounds: dict[str, int] = {}  # still to do
        self._planned: dict[str, int] = {}
        self._trained = 0
        self._begin = time.monotonic()
        self._stopping = False
        self._live: Live | None = None
        self.add(runs)

    def add(self, runs: Sequence[Run]) -> None:
        """Says what there is to do; a search does so batch by batch."""
        for run in runs:
            self._width = max(self._width, len(run.name))
            self._rounds.setdefault(run.name, run.rounds or 0)
            self._planned[run.name] = run.rounds or 0

    def __enter__(self) -> "SweepView":
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Takes note of an event, and says so."""
        name = event.run.name
        before = self._running.get(name)
        if before is not None:
            self._trained += event.rounds - before.rounds
        self._rounds[name] = max(0, (event.run.rounds or 0) - event.rounds)
        if event.kind == "stopping" and not self._stopping:
            self._stopping = True
            self._console.print("Stopping: what runs ends with its round; Ctrl-C again kills it.")
        if event.kind in ("started", "progress", "stopping"):
            self._since.setdefault(name, time.monotonic())
            self._running[name] = event
        else:
            self._running.pop(name, None)
            self._rounds[name] = 0
            self._ended += 1
            self._failed += event.kind == "failed"
        if not self._worth_a_line(event):
            return
        self._said[name] = time.monotonic()
        mark, style = _MARKS[event.kind]
        line = Text.assemble((mark, style), " ", *self._words(event))
        if event.kind in ("progress", "done", "stopped"):
            line.append(f"  {duration(time.monotonic() - self._since[name])}")
        if event.kind == "skipped":
            line.append("  already finished", "dim")
        if event.reason:
            line.append(f"  {event.reason}", "red")
        self._console.print(line, soft_wrap=True)

    def _worth_a_line(self, event: Event) -> bool:
        if event.kind == "progress":
            last = self._said.get(event.run.name, 0.0)
            return self._live is None and time.monotonic() - last >= self._seconds
        return event.kind != "stopping" and (event.kind != "started" or self._live is None)

    def _words(self, event: Event) -> list[str]:
        words = [event.run.name.ljust(self._width)]
        if event.kind != "started" or event.rounds:
            words.append(f"  round {event.rounds}/{event.run.rounds or '?'}")
        if event.value is not None:
            words.append(f"  {self._tag} {event.value:.4f}")
        return words

    def _render(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for name, event in self._running.items():
            value = "" if event.value is None else f"{self._tag} {event.value:.4f}"
            grid.add_row(
                Text("▸", "cyan"),
                name,
                ProgressBar(event.run.rounds or 1, event.rounds, width=20),
                f"round {event.rounds}/{event.run.rounds or '?'}",
                value,
                Text(duration(now - self._since[name]), "dim"),
            )
        left = self._left(now)
        words = f"{self._ended} of {self._total} runs ended"
        failed = f", {self._failed} failed" if self._failed else ""
        return Group(grid, Text(f"{words}{failed}{left}", "bold"))

    def _left(self, now: float) -> str:
        """The time for the rounds to come, at the pace of those of this sweep."""
        if not self._trained or not all(self._planned.values()):
            return ""
        unknown = max(0, self._total - len(self._planned)) * max(self._planned.values())
        rounds = sum(self._rounds.values()) + unknown
        return f", about {duration(rounds * (now - self._begin) / self._trained)} left"


def duration(seconds: float) -> str:
    """Such as ``1 h 05 min``, ``3 min 20 s`` or ``12 s``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def show_failures(console: Console, outcomes: Sequence[Outcome]) -> int:
    """Says which runs failed, why, and where their logs are; the exit code, 1 if one did."""
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        console.print(f"\n{len(failed)} of {len(outcomes)} runs failed:")
        for outcome in failed:
            reason = f"  {outcome.run.name}: {outcome.reason}\n    log: {outcome.run.log}"
            console.print(reason, soft_wrap=True)
    return 1 if failed else 0
