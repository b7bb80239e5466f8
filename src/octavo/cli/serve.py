"""`octavo serve`: an OpenAI-compatible server.

Decides how its start and end look on a terminal. Invariant: the address and the executor are told
on stderr; stdout stays empty.
"""

import sys
from typing import Any

from octavo.config import EngineConfig, ServerConfig
from octavo.engine.launch import LaunchedChild, start_child
from octavo.server.listening import listen
from octavo.weights.fetch import resolve


def run_serve(
    model: str,
    *,
    engine: dict[str, Any],
    server: dict[str, Any],
    launched: LaunchedChild | None = None,
) -> None:
    """Serve a model until a signal.

    The engine's process is `launched` already or starts here, before this one imports its server,
    which takes as long.
    """
    engine_config = EngineConfig.from_dict({"model": model, **engine})
    server_config = ServerConfig.from_dict(server)
    with listen(server_config.host, server_config.port) as listener:
        resolve(model)  # fetched by one process, and told before another starts
        child = (launched or start_child()) if server_config.engine_process else None
        try:
            if child is not None:
                child.configure(engine_config)
            from octavo.server.run import log_to_stderr, serve

            log_to_stderr()
            serve(engine_config, server_config, listener, _tell, child)
        finally:
            if child is not None:
                child.kill()


def _tell(line: str) -> None:
    print(f"[{line}]", file=sys.stderr, flush=True)
