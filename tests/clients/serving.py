"""`octavo serve` in a process of its own, from the environment that `make test` uses."""

import re
import signal
import subprocess
import threading
from pathlib import Path

PATIENCE = 120


class LiveServer:
    """A server on a free port, with the default model; `lines` is what it said."""

    def __init__(self, octavo: Path, *options: str) -> None:
        self._command = [str(octavo), "serve", "--port", "0", *options]
        self.lines: list[str] = []
        self.address = ""

    @property
    def api(self) -> str:
        """What clients call the base URL."""
        return f"{self.address}/v1"

    def __enter__(self) -> "LiveServer":
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := re.search(r"Ready: .* at (http://\S+)/v1", line):
                self.address = found[1]
                break
        if not self.address:
            self.process.wait(PATIENCE)
            raise AssertionError(self.lines)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def stop(self) -> int:
        """Send SIGTERM and return the exit code; `lines` are complete then."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self.process.stderr.close()
        return code

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ignored(self) -> list[str]:
        """Return the names of fields that requests had and the server does not know."""
        found = (re.search(r"\bignored=(\S+)", line) for line in self.lines)
        return sorted({name for match in found if match for name in match[1].split(",")})
