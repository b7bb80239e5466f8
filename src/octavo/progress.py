"""Progress of long work on a terminal; silent where stderr is none.

Decides how progress looks. Knows nothing of what is counted.
"""

from typing import Any


class GenerationProgress:
    """A bar over requests, with generated tokens per second. Shown only on a terminal."""

    def __init__(self, num_requests: int, *, enabled: bool) -> None:
        self._num_tokens = 0
        self._progress: Any = None
        if enabled:
            self._start(num_requests)

    def _start(self, num_requests: int) -> None:
        # Rich costs tens of milliseconds to import, so it is imported where it is used.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        if not console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("Generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]} tok/s"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", total=num_requests, tokens=0, rate="-")
        self._progress.start()

    def add_tokens(self, count: int) -> None:
        """Count generated tokens."""
        self._num_tokens += count
        if self._progress is not None:
            elapsed = self._progress.tasks[0].elapsed or 0
            rate = f"{self._num_tokens / elapsed:.1f}" if elapsed else "-"
            self._progress.update(self._task, tokens=self._num_tokens, rate=rate)

    def finish_requests(self, count: int) -> None:
        """Count finished requests."""
        if self._progress is not None and count:
            self._progress.advance(self._task, count)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()


class WorkProgress:
    """A bar over work of many kinds. Elsewhere than on a terminal, a line for each kind."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._console = Console(stderr=True)
        self._name = ""
        self._progress = Progress(
            TextColumn("{task.description:24}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=1.0)

    def __enter__(self) -> "WorkProgress":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()

    def show(self, name: str, share: float) -> None:
        """Tell what runs now, and the share of all work that is done."""
        if name and name != self._name and not self._console.is_terminal:
            self._console.print(f"{name} ...", markup=False, highlight=False)
        self._name = name
        self._progress.update(self._task, description=name, completed=share)
