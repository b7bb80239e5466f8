import pytest

from octavo.program.describe import describe
from octavo.program.fuse import fuse
from octavo.program.ops import ElementSizes
from octavo.program.program import Chunk
from tests.program.networks import FAMILIES, network


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("rewrite", [fuse, lambda program: program], ids=["fused", "plain"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_rows_add_up_to_the_program(architecture, rewrite, fold):
    program, sizes = rewrite(network(architecture)), ElementSizes()
    rows = describe(program, 100, sizes, fold=fold)
    traffic = program.traffic([Chunk(1, 100)], 1, sizes)
    assert sum(row.flops * row.count for row in rows) == program.flops_per_token(100)
    assert sum(row.bytes * row.count for row in rows) == traffic.total
    assert sum(row.count for row in rows) == len(program.operations)


def test_equal_layers_are_one():
    spans = {row.layers for row in describe(network())}
    # The first layer reads the embedding, the last selects rows.
    assert spans == {None, (0, 0), (1, 5), (6, 6)}


def test_layers_with_and_without_a_window_are_told_apart():
    rows = describe(network("Gemma3ForCausalLM"))
    windows = {row.layers: row.window for row in rows if row.operation == "Attention"}
    assert windows == {(0, 0): 24, (1, 4): 24, (5, 5): None, (6, 6): 24}


def test_unfolded_table_has_a_row_for_each_operation():
    program = network()
    rows = describe(program, fold=False)
    assert [row.operation for row in rows] == [type(op).__name__ for op in program.operations]
