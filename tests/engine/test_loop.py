"""What a loop sends: a heartbeat per step, and before a long one a word that it will be long."""

from dataclasses import replace

from octavo.cost.hardware import MACHINES
from octavo.cost.predictor import StepPredictor
from octavo.engine import clock
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Add, Command, Event, Expecting, Stepped
from tests.engines import greedy, tiny, tokens


class ListPort:
    """Hands out some commands, then ends; keeps what is sent."""

    def __init__(self, *commands: Command) -> None:
        self._commands = list(commands)
        self.events: list[Event] = []

    def receive(self, *, wait: bool) -> list[Command]:
        if wait and not self._commands:
            raise EOFError
        commands, self._commands = self._commands, []
        return commands

    def send(self, event: Event) -> None:
        self.events.append(event)


def events_on(bandwidth: float) -> list[Event]:
    """Serve one request on an engine that believes in a machine of some bandwidth."""
    port = ListPort(Add("a", tokens(5)["prompt_token_ids"], greedy(2)))
    with tiny() as llm:
        engine = llm.engine
        machine = replace(MACHINES["xeon-8480"], bandwidth=bandwidth)
        engine.predictor = StepPredictor(engine.predictor.prepared, machine)
        EngineLoop(engine, port, clock.monotonic).run()
    return port.events


def test_a_step_that_will_be_long_is_announced_before_it_is_taken() -> None:
    events = events_on(bandwidth=1e3)
    announced = next(i for i, event in enumerate(events) if isinstance(event, Expecting))
    assert events[announced].seconds > 1  # type: ignore[union-attr]
    assert isinstance(events[announced + 1], Stepped)


def test_short_steps_are_not_announced() -> None:
    kinds = {type(event) for event in events_on(bandwidth=1e12)}
    assert Expecting not in kinds
    assert Stepped in kinds
