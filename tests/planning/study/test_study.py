"""The whole study: seven experiments, told in order, and what cannot be studied."""

import json
import shutil
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.errors import ModelNotFoundError, SettingError
from octavo.planning.study.study import Study, open_subject, run_study
from tests.engines import TINY
from tests.executors.native import needs_library

TITLES = [
    "With and without the KV cache",
    "The roofline of this machine",
    "Paged against contiguous memory",
    "Continuous against static batching",
    "Shared prefixes",
    "Chunked prefill",
    "Predicted against measured step time",
]


def config_of(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig.from_dict({"model": str(folder), **settings})


def short_model(folder: Path, num_positions: int) -> Path:
    """The tiny model, made for fewer positions."""
    copy = folder / "short"
    shutil.copytree(TINY / "llama", copy, ignore=shutil.ignore_patterns("logits.npz"))
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps(values | {"max_position_embeddings": num_positions})
    )
    return copy


def test_seven_experiments_each_with_figures_a_finding_and_numbers(study: Study) -> None:
    assert [experiment.title for experiment in study.experiments] == TITLES
    for experiment in study.experiments:
        assert experiment.finding.endswith(".")
        assert experiment.figures
        assert experiment.table.rows
        assert all(series.x for figure in experiment.figures for series in figure.series)


def test_what_figures_depend_on_is_told(study: Study) -> None:
    assert {"cpu", "cpus", "python"} <= set(study.about)
    assert study.is_quick
    assert any("measured just now" in note for note in study.notes)


@needs_library
def test_progress_never_falls_and_names_each_part(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    config = config_of(short_model(tmp_path, 512), num_gpu_blocks_override=128)
    found = run_study(
        config,
        open_subject(config),
        is_quick=True,
        progress=lambda name, share: told.append((name, share)),
    )
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len({name for name, _ in told}) == 1 + len(TITLES) + 1
    assert len(found.experiments) == len(TITLES)


@needs_library
def test_too_short_a_context_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"context of 512 tokens, but .* has 511"):
        open_subject(config_of(short_model(tmp_path, 511)))


def test_the_reference_executor_cannot_be_studied() -> None:
    with pytest.raises(SettingError, match="native library"):
        open_subject(config_of(TINY / "llama", executor="reference"))


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no-model"):
        open_subject(config_of(tmp_path / "no-model"))
