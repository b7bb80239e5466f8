"""`octavo study`: experiments on this machine, and one page that shows them.

Decides where the page is written and what it may replace. `planning.study` runs and draws.

Invariant: what would keep the page from being written is told before any experiment runs, and a
study that is broken off leaves no file behind.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import BadRequestError
from octavo.planning.study.page import MARK, page, plotly_library
from octavo.planning.study.study import open_subject, run_study
from octavo.progress import WorkProgress


def run_study_command(settings: dict[str, Any], output: Path, *, is_quick: bool) -> None:
    """Study a model and write the page; print the findings. settings: of the engine."""
    library = plotly_library()
    check_output(output)
    config = EngineConfig.from_dict(settings)
    subject = open_subject(config)
    with WorkProgress() as progress:
        study = run_study(config, subject, is_quick=is_quick, progress=progress.show)
    for number, experiment in enumerate(study.experiments, 1):
        print(f"{number}. {experiment.title}\n   {experiment.finding}")
    is_new = not output.exists()
    write_whole(output, page(study, library))
    print(f"{'Written to' if is_new else 'Replaced'} {output}", file=sys.stderr)


def check_output(output: Path) -> None:
    """Raise `BadRequestError` if the page cannot be written, or would replace something else."""
    if output.is_dir():
        raise BadRequestError(f"{output} is a folder. Give the page's file name with -o.")
    if output.exists() and not _is_study(output):
        raise BadRequestError(
            f"{output} exists and is no page of an earlier study. Choose another name with -o, or "
            "remove it."
        )
    try:
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise BadRequestError(
            f"The page cannot be written to {output}: {error.strerror}. Choose another place "
            "with -o."
        ) from None


def _is_study(output: Path) -> bool:
    try:
        with output.open(encoding="utf-8", errors="replace") as file:
            return file.read(len(MARK)) == MARK
    except OSError:
        return False


def write_whole(output: Path, text: str) -> None:
    """Write a file whole or not at all."""
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
