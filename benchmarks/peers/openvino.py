"""OpenVINO GenAI, in a worker's process; its model is exported once with optimum-intel."""

import os
import shutil
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import Command
from benchmarks.peers.install import make_venv, once, run_step
from benchmarks.peers.models import checkpoint_path, pool_tokens
from benchmarks.peers.peer import package_versions, usable_cpus
from benchmarks.peers.work import LARGE, SMALL, Work

_PACKAGES = ("openvino-genai==2026.4.1",)
_EXPORTER = ("optimum-intel[openvino]==2.2.0", "torch==2.13.0")
_WORKER = Path(__file__).parent / "workers" / "openvino_engine.py"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
_FORMATS = {SMALL: "fp16", LARGE: "int8"}
_KV_BLOCK = 32


class OpenVINO:
    """The continuous batching pipeline, without HTTP."""

    name = "openvino"
    title = "OpenVINO, in process"

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._folder = cache / "openvino"
        self._exporter = cache / "openvino-export"

    def install(self) -> None:
        """Install it, and export both models: 6 GB for the exporter."""
        once(self._folder, "\n".join(_PACKAGES), lambda: _install(self._folder, _PACKAGES))
        for model in (SMALL, LARGE):
            if not (self._model(model) / "openvino_model.bin").exists():
                self._export(model)

    def _export(self, model: str) -> None:
        once(self._exporter, "\n".join(_EXPORTER), lambda: _install(self._exporter, _EXPORTER))
        target = self._model(model)
        scratch = target.with_name(f"{target.name}.new")
        shutil.rmtree(scratch, ignore_errors=True)
        source = checkpoint_path(model, self._cache)
        run_step(
            [
                *(self._exporter / ".venv" / "bin" / "optimum-cli", "export", "openvino"),
                *("--model", source, "--task", "text-generation-with-past"),
                *("--weight-format", _FORMATS[model], scratch),
            ],
            self._exporter / "install.log",
            environment={**os.environ, **_OFFLINE},
        )
        os.replace(scratch, target)

    def _model(self, model: str) -> Path:
        return self._cache / "models" / f"{model}-openvino-{_FORMATS[model]}"

    def versions(self) -> dict[str, Any]:
        """Return the versions of its packages."""
        return package_versions(self._folder / ".venv" / "bin", "openvino-genai", "openvino")

    def command(self, work: Work) -> Command:
        """Run the worker."""
        blocks = pool_tokens(work.model, work.pool_bytes, self._cache) // _KV_BLOCK
        python = self._folder / ".venv" / "bin" / "python"
        threads = str(len(usable_cpus()))
        argv = (str(python), str(_WORKER), str(self._model(work.model)), threads, str(blocks))
        return Command(argv=argv, environment=tuple(_OFFLINE.items()))


def _install(folder: Path, packages: tuple[str, ...]) -> None:
    log = folder / "install.log"
    programs = make_venv(folder, packages, log)
    # The one would send usage statistics; the other stops the exporter where it is built for
    # another torch. Text models need neither.
    unwanted = ("openvino-telemetry", "torchvision")
    run_step([programs / "pip", "uninstall", "--quiet", "--yes", *unwanted], log)
