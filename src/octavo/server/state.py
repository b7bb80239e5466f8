"""The routes about the server itself: models, health, load, version, cache.

Decides what each says of the service. Invariant: health is told from the engine's heartbeat, and
needs no answer from the engine.
"""

from importlib.metadata import version as version_of

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from octavo.engine.client import EngineState
from octavo.errors import ModelNotFoundError
from octavo.server.failures import JSONReply, body
from octavo.server.service import Service
from octavo.server.shapes import Json


class State:
    """Handlers of the routes about the server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self) -> Response:
        """List the served names."""
        return JSONReply({"object": "list", "data": [self._model(n) for n in self._names]})

    async def model(self, name: str) -> Response:
        """Describe one served name."""
        if name not in self._names:
            served = ", ".join(self._names)
            raise ModelNotFoundError(f"The model does not exist here. The server has {served}.")
        return JSONReply(self._model(name))

    @property
    def _names(self) -> list[str]:
        return self._service.model_names

    def _model(self, name: str) -> Json:
        status = self._service.client.status
        known = status.state is EngineState.READY
        return {
            "id": name,
            "object": "model",
            "created": self._service.started_at,
            "owned_by": "octavo",
            "root": self._names[0],
            "parent": None,
            "max_model_len": self._service.client.intake.max_model_len if known else None,
        }

    async def version(self) -> Response:
        """Tell the version."""
        return JSONReply({"version": version_of("octavo")})

    async def livez(self) -> Response:
        """Tell whether the server is worth keeping: it is, unless its engine is given up."""
        status = self._service.client.status
        if status.state is EngineState.FAILED:
            return _unhealthy(f"the engine is {status.state}: {status.reason}", None)
        return JSONReply({"status": "alive", "engine": str(status.state)})

    async def readyz(self) -> Response:
        """Tell whether a request would be served now."""
        reason = self._service.why_not_ready()
        status = self._service.client.status
        if reason:
            return _unhealthy(reason, status.retry_after)
        return JSONReply({"status": "ready", "seconds_since_step": round(status.silent_seconds, 3)})

    async def load(self) -> Response:
        """Tell how much runs and waits."""
        admission = self._service.admission
        stats = self._service.client.stats()
        return JSONReply(
            {
                "server_load": admission.num_open,
                "num_waiting": admission.num_waiting,
                "num_waiting_tokens": admission.num_waiting_tokens,
                "num_running": admission.num_running,
                "kv_cache_usage": None if stats is None else stats.kv_cache_usage,
                "num_restarts": self._service.client.num_restarts,
            }
        )

    async def metrics(self) -> Response:
        """Tell the metrics, in Prometheus' text format."""
        return Response(
            generate_latest(self._service.registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    async def reset_prefix_cache(self) -> Response:
        """Forget every cached block."""
        self._service.client.reset_prefix_cache()
        return JSONReply({"status": "reset"})


def _unhealthy(reason: str, retry_after: float | None) -> Response:
    content = body(503, reason[0].upper() + reason[1:] + ".")
    headers = {"retry-after": str(max(1, round(retry_after)))} if retry_after else {}
    return JSONReply(content, 503, headers)
