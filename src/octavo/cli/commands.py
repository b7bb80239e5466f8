"""The menu of the `octavo` command, and how errors end a line of it.

Decides names and arguments of the commands; each imports what it needs when it runs, so that
`octavo --help` is instant. Invariant: what the user got wrong becomes one line on stderr, and never
a traceback.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import bench
from octavo.cli.settings import (
    ENGINE_OPTIONS,
    PLANNED_ENGINE_OPTIONS,
    REPLAY_OPTIONS,
    SAMPLING_OPTIONS,
    SERVED_ENGINE_OPTIONS,
    SERVER_OPTIONS,
    STUDIED_ENGINE_OPTIONS,
    Command,
    with_options,
)
from octavo.config import EngineConfig
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.engine.launch import LaunchedChild

_LOOKS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    # Rich cuts long option names at 80 columns, and reads "[default: x]" as markup.
    "rich_markup_mode": None,
    "context_settings": {"max_content_width": 100},
}
app = typer.Typer(help="Octavo serves large language models from the machine you have.", **_LOOKS)
# The base of Typer's errors about usage belongs to its private copy of click.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

DEFAULT_MODEL = EngineConfig().model
Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Short name, path, hf:org/name[:file] or pypi:…"),
]
ModelArgument = Annotated[
    str, typer.Argument(help="Short name, path, hf:org/name[:file] or pypi:…")
]
System = Annotated[str | None, typer.Option("--system", help="System message.")]
app.add_typer(bench.app, name="bench")
_GROUPS = (("sampling", SAMPLING_OPTIONS), ("engine", ENGINE_OPTIONS))


@app.command(cls=Command)
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
    from octavo.cli.generate import read_prompt, run_generate

    text = read_prompt() if prompt == "-" else prompt
    run_generate(model, text, engine=engine, sampling=sampling, raw=raw, system=system)


@app.command(cls=Command)
@with_options(*_GROUPS)
def chat(
    sampling: dict[str, Any],
    engine: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    system: System = None,
) -> None:
    """Talk with a model.

    An empty line or /exit ends the conversation, /clear starts it anew, ^C ends an answer.
    """
    from octavo.cli.generate import run_chat

    run_chat(model, engine=engine, sampling=sampling, system=system)


@app.command(cls=Command)
@with_options(*_GROUPS)
def run(
    sampling: dict[str, Any],
    engine: dict[str, Any],
    model: ModelArgument = DEFAULT_MODEL,
    system: System = None,
) -> None:
    """Fetch a model if need be, and talk with it, as `octavo chat` does."""
    from octavo.cli.generate import run_chat

    run_chat(model, engine=engine, sampling=sampling, system=system)


@app.command(cls=Command)
@with_options(("server", SERVER_OPTIONS), ("engine", SERVED_ENGINE_OPTIONS))
def serve(
    context: typer.Context,
    server: dict[str, Any],
    engine: dict[str, Any],
    model: ModelArgument = DEFAULT_MODEL,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does."""
    from octavo.cli.serve import run_serve

    run_serve(model, engine=engine, server=server, launched=context.obj)


@app.command(cls=Command)
def explain(
    request_id: Annotated[
        str, typer.Argument(help="A request's x-request-id, or the id of its reply.")
    ],
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of words.")
    ] = False,
) -> None:
    """Tell what happened to a request of a running server, and where its time went.

    Also while it runs. A server with keys wants the one that sent the request, or an admin's, in
    OPENAI_API_KEY.
    """
    from octavo.cli.explain import run_explain

    run_explain(request_id, url, as_json=as_json)


@app.command(cls=Command)
def pull(model: ModelArgument = DEFAULT_MODEL) -> None:
    """Fetch a model into the cache folder."""
    from octavo.cli.models import run_pull

    run_pull(model)


@app.command("list", cls=Command)
def list_models() -> None:
    """Show the fetched models and the names that can be fetched."""
    from octavo.cli.models import run_list

    run_list()


@app.command("rm", cls=Command)
def remove(model: Annotated[str, typer.Argument(help="A name as `octavo list` shows it.")]) -> None:
    """Remove a model from the cache folder."""
    from octavo.cli.models import run_remove

    run_remove(model)


@app.command(cls=Command)
def program(
    model: ModelArgument = DEFAULT_MODEL,
    context: Annotated[
        int, typer.Option(help="Tokens that attention reads, for its flops and bytes.", min=1)
    ] = 1024,
    plain: Annotated[
        bool, typer.Option("--plain", help="Show the operations before they are fused.")
    ] = False,
) -> None:
    """Show a model's operations and what they cost per token.

    Shapes, parameters, flops and bytes follow from the configuration alone: no weights are read.
    """
    from octavo.cli.program import run_program

    run_program(model, context=context, plain=plain)


@app.command(cls=Command)
@with_options(("replay", REPLAY_OPTIONS), ("engine", PLANNED_ENGINE_OPTIONS))
def plan(
    replay: dict[str, Any],
    engine: dict[str, Any],
    model: ModelArgument = DEFAULT_MODEL,
    machine: Annotated[
        str | None, typer.Option(help="A machine of the table, as h100 or l4; by default this one.")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", help="Its memory, instead of what is known.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a prompt. [default: 512]", min=1)
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer. [default: 128]", min=1)
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(help="A load: how many machines does it need?")
    ] = None,
    max_ttft_ms: Annotated[
        float | None, typer.Option("--max-ttft-ms", help="The load's longest time to first token.")
    ] = None,
    max_itl_ms: Annotated[
        float | None, typer.Option("--max-itl-ms", help="The load's longest time between tokens.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Simulate this recorded traffic (Azure's or Mooncake's).")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Run the engine too, and print predicted beside measured."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Plan a model on a machine: memory, latency, throughput, machines for a load.

    All of it is predicted from the configuration: without --verify no weights are read and nothing
    runs. For this machine, `octavo doctor` makes the prediction better. With a trace, the real
    scheduler runs on virtual time instead, on one machine or several behind a router, and the
    limits decide what counts as goodput.
    """
    from octavo.cli.plan import Asked, run_plan

    asked = Asked(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_second=requests_per_second,
        max_ttft_ms=max_ttft_ms,
        max_itl_ms=max_itl_ms,
        trace=trace,
        verify=verify,
        **replay,
    )
    run_plan({"model": model, **engine}, machine, memory_gib, asked, as_json=as_json)


@app.command(cls=Command)
@with_options(("engine", STUDIED_ENGINE_OPTIONS))
def study(
    engine: dict[str, Any],
    model: ModelArgument = DEFAULT_MODEL,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the page is written.")
    ] = Path("study.html"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller experiments: rougher figures, in seconds.")
    ] = False,
) -> None:
    """Run seven experiments on this machine, and write one page that shows them.

    They concern the KV cache, the roofline, paging, batching, shared prefixes, chunked prefill, and
    how well steps are predicted. Each has plots, a sentence of what they show and its numbers; the
    sentences go to standard output too. A page of an earlier study is replaced, another file not.
    """
    from octavo.cli.study import run_study_command

    run_study_command({"model": model, **engine}, output, is_quick=quick)


@app.command(cls=Command)
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Measure this machine in a few seconds, and say what its numbers and its set-up mean.

    The result is kept for this CPU model, affinity and version; `octavo plan` uses it.
    """
    from octavo.cli.doctor import run_doctor

    run_doctor(as_json=as_json)


@app.command(cls=Command)
def version() -> None:
    """Print the version."""
    from octavo import __version__

    print(__version__)


def run_line(arguments: list[str], launched: "LaunchedChild | None" = None) -> int:
    """Return the exit code of one command line; Typer sees to closed pipes and ^C.

    launched: a process for an engine, which `serve` uses if it can.
    """
    try:
        chosen = _only(arguments[0])
        return chosen(arguments, prog_name="octavo", standalone_mode=False, obj=launched) or 0
    except UsageError as error:
        return _explain(error)
    except (OctavoError, OSError) as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1


def _only(name: str) -> typer.Typer:
    """Return the menu with one command, since Typer takes a while to build each; else all of it."""
    found = [c for c in app.registered_commands if name == (c.name or c.callback.__name__)]  # type: ignore[union-attr]
    if not found:
        return app
    menu = typer.Typer(**_LOOKS)
    menu.registered_commands += found
    menu.callback()(lambda: None)  # without it, one command would be no menu
    return menu


def _explain(error: Any) -> int:
    command = error.ctx.command_path if error.ctx else "octavo"
    message = error.format_message().rstrip(".")
    print(f"{command}: {message}. See `{command} --help`.", file=sys.stderr)
    return 2
