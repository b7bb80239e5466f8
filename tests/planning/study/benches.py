"""Workbenches for tests: one on virtual time, where every figure is known, and a tiny real one."""

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.config import EngineConfig
from octavo.cost.accounting import PreparedProgram
from octavo.cost.hardware import MACHINES
from octavo.planning.plan import prepared_for
from octavo.planning.simulation import Simulator
from octavo.planning.study.study import opened
from octavo.planning.study.workbench import Workbench
from octavo.planning.subject import Subject, read_subject
from tests.engines import TINY
from tests.planning.subjects import subject

MACHINE = MACHINES["l4"]
SUBJECT = subject()
CONFIG = EngineConfig(max_num_batched_tokens=1280)


def virtual() -> Workbench:
    """Steps take what they cost on an L4, and nothing is computed."""
    (machine,) = Simulator(SUBJECT, MACHINE, CONFIG).replicas
    return Workbench(machine.engine, machine.clock)


def prepared() -> PreparedProgram:
    return prepared_for(SUBJECT, MACHINE, CONFIG)


def tiny_subject() -> Subject:
    return read_subject(str(TINY / "llama"))


@contextmanager
def real() -> Iterator[Workbench]:
    """The tiny random-weight model on whatever computes here."""
    config = EngineConfig(model=str(TINY / "llama"), num_gpu_blocks_override=128)
    with opened(config, 1024) as bench:
        yield bench
