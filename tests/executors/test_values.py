"""Where values lie: no operation writes over what it or a later one still reads."""

import numpy as np
import pytest

from octavo.executors.values import place_values
from octavo.program import ops
from octavo.program.fuse import fuse
from tests.executors.native import network as built
from tests.program.networks import FAMILIES, network

PROGRAMS = {
    **{name: network(name) for name in FAMILIES},
    **{f"{name}, fused": fuse(network(name)) for name in FAMILIES},
    "ragged": fuse(built(width=50, head_dim=32, inner=77, vocab=33)),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.parametrize(("max_rows", "head_rows"), [(100, 64), (64, 64), (8, 8), (1, 1)])
def test_every_value_has_its_shape_and_rows_of_floats_without_gaps(program, max_rows, head_rows):
    values = place_values(program, max_rows, head_rows)
    *others, product, _ = program.operations
    for op in others:
        for name, width in op.outputs:
            assert values[name].shape == (max_rows, width)
            assert values[name].strides[1] == 4
    (logits,) = product.outputs
    assert values[logits.name].shape == (head_rows, logits.width)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_what_will_still_be_read_is_never_written_over(program):
    """Each operation writes its own number; each input must still hold its writer's."""
    values = place_values(program, 3, 3)
    writer: dict[str, int] = {}
    for number, op in enumerate(program.operations[:-1], 1):
        for name, _ in op.inputs:
            assert (values[name] == writer[name]).all(), f"{name} is gone before operation {number}"
        if isinstance(op, ops.Split):
            writer.update(dict.fromkeys(op.outs, writer[op.x]))
            continue
        inputs = {name: values[name].copy() for name, _ in op.inputs}
        for name, _ in op.outputs:
            values[name][...] = writer[name] = number
        for name, before in inputs.items():
            assert np.array_equal(values[name], before), f"operation {number} writes over {name}"
    last = program.operations[-1].inputs[0].name
    assert (values[last] == writer[last]).all()


def test_other_rows_can_be_selected_once_the_head_has_run():
    """Final states are made after logits: nothing of the head may lie where SelectRows reads."""
    program = fuse(network())
    values = place_values(program, 100, 64)
    selected = [op.x for op in program.head if isinstance(op, ops.SelectRows)]
    assert len(selected) == 2
    head = [name for op in program.head[:-1] for name, _ in op.outputs]
    for name in selected:
        assert not any(np.shares_memory(values[name], values[other]) for other in head)


def test_a_later_slice_of_logits_still_finds_its_states():
    program = fuse(network())
    values = place_values(program, 100, 64)
    logits = program.operations[-1].inputs[0].name
    assert not np.shares_memory(values[program.state], values[logits])


def test_memory_does_not_grow_with_the_layers():
    """Only the residual stream and what one layer needs are alive at a time."""
    sizes = []
    for layers in (2, 20):
        values = place_values(fuse(built(layers=layers)), 64, 64)
        bases = {id(v.base): v.base for v in values.values()}
        sizes.append(sum(base.nbytes for base in bases.values()))
    assert sizes[0] == sizes[1]
