"""Octavo: its engine in a worker's process, and its server where there is one."""

import compileall
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import Command
from benchmarks.peers.install import UnavailableError
from benchmarks.peers.models import gguf_path
from benchmarks.peers.work import Work

_WORKER = Path(__file__).parent / "workers" / "octavo_engine.py"


class Octavo:
    """The engine in a process of its own, without HTTP.

    settings: of `EngineConfig`, beside the pool and the number of sequences.
    """

    name = "octavo"
    title = "Octavo, in process"

    def __init__(self, cache: Path, settings: dict[str, Any]) -> None:
        self._cache = cache
        self._settings = settings

    def install(self) -> None:
        """Octavo is what this Python imports; compiled, as pip leaves what it installs."""
        import octavo

        compileall.compile_dir(Path(octavo.__file__).parent, quiet=1)

    def versions(self) -> dict[str, Any]:
        """Return its version."""
        from octavo import __version__

        return {"octavo": __version__}

    def command(self, work: Work) -> Command:
        """Run the worker."""
        settings = json.dumps(self._settings_for(work))
        model = str(gguf_path(work.model, self._cache))
        return Command(argv=(sys.executable, str(_WORKER), model, settings))

    def _settings_for(self, work: Work) -> dict[str, Any]:
        return {"kv_cache_memory_bytes": work.pool_bytes, **self._settings}


class OctavoServer(Octavo):
    """`octavo serve`."""

    name = "octavo-http"
    title = "Octavo"

    def install(self) -> None:
        """As in process. Raises UnavailableError if this Octavo has no server."""
        super().install()
        asked = subprocess.run([_octavo(), "serve", "--help"], capture_output=True, check=False)
        if asked.returncode:
            raise UnavailableError("this Octavo has no `octavo serve`")

    def command(self, work: Work) -> Command:
        """Run the server."""
        model = str(gguf_path(work.model, self._cache))
        flags = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in self._settings_for(work).items()
        ]
        address = ("--host=127.0.0.1", "--port={port}", f"--served-model-name={work.model}")
        argv = (str(_octavo()), "serve", model, *address, *flags)
        return Command(argv=argv, model=work.model)


def _octavo() -> Path:
    return Path(sys.executable).parent / "octavo"
