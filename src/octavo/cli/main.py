"""The `octavo` command: its menu, and how errors and interrupts end it.

Decides names and arguments of the commands; each imports what it needs when it runs, so that
`octavo --help` is instant. Invariant: an `OctavoError` becomes one line on stderr and exit code 1.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.settings import ENGINE_OPTIONS, SAMPLING_OPTIONS, with_options
from octavo.errors import OctavoError

app = typer.Typer(
    help="Octavo serves large language models from the machine you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEFAULT_MODEL = "smollm2-135m"
Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Short name, path, hf:org/name[:file] or pypi:…"),
]
ModelArgument = Annotated[
    str, typer.Argument(help="Short name, path, hf:org/name[:file] or pypi:…")
]
System = Annotated[str | None, typer.Option("--system", help="System message.")]
_GROUPS = (("sampling", SAMPLING_OPTIONS), ("engine", ENGINE_OPTIONS))


@app.command()
@with_options(*_GROUPS)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    sampling: dict[str, Any],
    engine: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    system: System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")
    ] = False,
) -> None:
    """Answer one prompt, streaming, then print a line of figures."""
    from octavo.cli.generate import run_generate

    text = sys.stdin.read() if prompt == "-" else prompt
    run_generate(model, text, engine=engine, sampling=sampling, raw=raw, system=system)


@app.command()
@with_options(*_GROUPS)
def chat(
    sampling: dict[str, Any],
    engine: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    system: System = None,
) -> None:
    """Talk with a model; an empty line or /exit ends, /clear starts anew."""
    from octavo.cli.generate import run_chat

    run_chat(model, engine=engine, sampling=sampling, system=system)


@app.command()
@with_options(*_GROUPS)
def run(
    sampling: dict[str, Any],
    engine: dict[str, Any],
    model: ModelArgument = DEFAULT_MODEL,
    system: System = None,
) -> None:
    """Fetch a model if need be, and talk with it."""
    from octavo.cli.generate import run_chat

    run_chat(model, engine=engine, sampling=sampling, system=system)


@app.command()
def pull(model: ModelArgument = DEFAULT_MODEL) -> None:
    """Fetch a model into the cache folder."""
    from octavo.cli.models import run_pull

    run_pull(model)


@app.command("list")
def list_models() -> None:
    """Show the models in the cache folder and those that can be fetched by name."""
    from octavo.cli.models import run_list

    run_list()


@app.command("rm")
def remove(model: Annotated[str, typer.Argument(help="A name as `octavo list` shows it.")]) -> None:
    """Remove a model from the cache folder."""
    from octavo.cli.models import run_remove

    run_remove(model)


@app.command()
def program(
    model: ModelArgument = DEFAULT_MODEL,
    context: Annotated[
        int, typer.Option(help="Tokens that attention reads, for its flops and bytes.", min=1)
    ] = 1024,
    plain: Annotated[
        bool, typer.Option("--plain", help="Show the operations before they are fused.")
    ] = False,
) -> None:
    """Show a model's operations with shapes, parameters, flops and bytes per token."""
    from octavo.cli.program import run_program

    run_program(model, context=context, plain=plain)


@app.command()
def version() -> None:
    """Print the version."""
    from octavo import __version__

    print(__version__)


def main() -> None:
    """Run the command line; the exit code is 0, 1 for an error, 2 for wrong usage, 130 for ^C."""
    try:
        app()
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader has gone; closing stderr keeps the interpreter from saying so once more.
        sys.stderr.close()
        sys.exit(1)


def model_name(reference: str) -> str:
    """Return how a model is called in messages: a path's last part, else the reference itself."""
    return Path(reference).name if Path(reference).exists() else reference
