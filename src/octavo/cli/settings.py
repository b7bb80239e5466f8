"""Flags from settings: each `EngineConfig` field and sampling parameter becomes one option.

Decides how a setting is spelled on the command line. Checks nothing: `EngineConfig` and
`SamplingParams` do. Invariant: an option that was not given is not passed on, so defaults live in
one place.
"""

import inspect
from collections.abc import Callable, Container
from dataclasses import Field, dataclass, fields
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand

from octavo.config import EngineConfig, ServerConfig, choices_of, default_of
from octavo.planning.load.config import LoadConfig


@dataclass(frozen=True, slots=True)
class Option:
    """One command line option for a setting of the same name. `default` is only shown."""

    name: str
    type: type
    help: str
    default: Any


SAMPLING_OPTIONS = (
    Option("max_tokens", int, "Most tokens to generate.", "to the end of the answer"),
    Option("temperature", float, "0 is greedy; higher is more varied.", "the model's, else 0"),
    Option("top_p", float, "Sample from the smallest set with this probability.", "the model's"),
    Option("top_k", int, "Sample from so many of the likeliest tokens.", "the model's"),
    Option("min_p", float, "Drop tokens less likely than this share of the likeliest.", "0"),
    Option("repetition_penalty", float, "Above 1 discourages repetition.", "the model's"),
    Option("seed", int, "Same seed, same answer.", "a new one each time"),
)
_TAKEN = frozenset(option.name for option in SAMPLING_OPTIONS)


def _type_of(setting: "Field[Any]") -> type:
    choices = choices_of(setting)
    if choices:
        return type(choices[0])
    if get_origin(setting.type) is None:
        assert isinstance(setting.type, type)
        return setting.type
    inner: type = next(t for t in get_args(setting.type) if t is not type(None))
    return inner


def _help_of(setting: "Field[Any]") -> str:
    text: str = setting.metadata["help"]
    choices = choices_of(setting)
    return f"{text} One of {', '.join(map(str, choices))}." if choices else text


def options_of(config: type, without: Container[str] = ()) -> tuple[Option, ...]:
    """Return one option per setting of a configuration.

    A setting's metadata may say how its default is "shown", where that is no value.
    """
    return tuple(
        Option(
            setting.name,
            _type_of(setting),
            _help_of(setting),
            setting.metadata.get("shown") or default_of(setting),
        )
        for setting in fields(config)
        if setting.name not in without
    )


LOAD_OPTIONS = options_of(LoadConfig)
SERVER_OPTIONS = options_of(ServerConfig)
SERVED_ENGINE_OPTIONS = options_of(EngineConfig, without={"model"})
ENGINE_OPTIONS = options_of(EngineConfig, without={"model", *_TAKEN})
# What decides memory and the size of steps.
_PLANNED = frozenset(
    {
        "quantization",
        "kv_cache_dtype",
        "block_size",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
    }
)
PLANNED_ENGINE_OPTIONS = tuple(o for o in SERVED_ENGINE_OPTIONS if o.name in _PLANNED)

REPLAY_OPTIONS = (
    Option("trace_speed", float, "2 sends the trace twice as fast.", "1"),
    Option("trace_length_scale", float, "Multiply the trace's lengths by this.", "1"),
    Option("trace_limit", int, "Requests of the trace.", "all"),
    Option("machines", int, "Machines that serve the trace.", "1"),
    Option(
        "router",
        str,
        "Which of them gets a request: round-robin, least-loaded or prefix-aware.",
        "round-robin",
    ),
)
# What the experiments of a study do not change themselves.
_STUDIED = frozenset({"quantization", "weight_scales", "kv_cache_dtype", "block_size"})
STUDIED_ENGINE_OPTIONS = tuple(o for o in SERVED_ENGINE_OPTIONS if o.name in _STUDIED)


class Command(TyperCommand):
    """A command whose help lists its options by group, with their whole names."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one list per group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            kind = "Options" if parameter.param_type_name == "option" else "Arguments"
            title = getattr(parameter, "rich_help_panel", None) or kind
            if record is not None:
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def with_options(*groups: tuple[str, tuple[Option, ...]]) -> Callable[[Callable[..., Any]], Any]:
    """Add options to a command, which receives those given as one dict per group.

    groups: (parameter of the command, its options). The parameter gets {name: value}.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command)
        names = {group for group, _ in groups}
        kept = [p for p in own.parameters.values() if p.name not in names]
        added = [_parameter(option, group) for group, options in groups for option in options]

        def run(**values: Any) -> Any:
            for group, options in groups:
                given = {o.name: values.pop(o.name) for o in options}
                values[group] = {n: v for n, v in given.items() if v is not None}
            return command(**values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = own.replace(parameters=kept + added)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in kept + added}
        return run

    return decorate


def _parameter(option: Option, group: str) -> inspect.Parameter:
    flag = "--" + option.name.replace("_", "-")
    declared = f"{flag}/--no-{flag[2:]}" if option.type is bool else flag
    shown = "" if option.default is None else f" [default: {option.default}]"
    annotation = Annotated[
        option.type | None,  # type: ignore[name-defined]
        typer.Option(
            declared,
            help=option.help + shown,
            show_default=False,
            rich_help_panel=f"{group.replace('_', ' ').capitalize()}",
        ),
    ]
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )
