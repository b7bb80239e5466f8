"""A quick study of the tiny model, made once: seconds."""

from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.native import library
from octavo.planning.study.study import Study, open_subject, run_study
from tests.engines import TINY


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    if library is None:
        pytest.skip("a study needs the native library")
    config = EngineConfig(model=str(TINY / "llama"), num_gpu_blocks_override=256)
    with pytest.MonkeyPatch.context() as patch:
        # Nothing measured before counts.
        patch.setenv("OCTAVO_CACHE", str(tmp_path_factory.mktemp("cache")))
        return run_study(
            config, open_subject(config), is_quick=True, progress=lambda name, share: None
        )


@pytest.fixture(scope="session")
def page_file(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from octavo.planning.study.page import page, plotly_library

    file = tmp_path_factory.mktemp("page") / "study.html"
    file.write_text(page(study, plotly_library()), encoding="utf-8")
    return file
