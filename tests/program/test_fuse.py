import pytest

from octavo.program.fuse import fuse
from octavo.program.ops import AddRMSNorm, ElementSizes, Linear, RMSNorm, Split
from octavo.program.program import Builder, Chunk, KVGroup
from tests.program.networks import FAMILIES, network

STEP = [Chunk(1, 90), Chunk(33, 33)]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_fused_program_has_the_same_flops_and_parameters(architecture):
    plain = network(architecture)
    fused = fuse(plain)
    assert fused.flops(STEP, 2) == plain.flops(STEP, 2)
    assert fused.parameters == plain.parameters
    assert fused.kv_groups == plain.kv_groups


@pytest.mark.parametrize("architecture", FAMILIES)
def test_fused_program_moves_fewer_activations_and_the_same_weights(architecture):
    plain, sizes = network(architecture), ElementSizes()
    before, after = plain.traffic(STEP, 2, sizes), fuse(plain).traffic(STEP, 2, sizes)
    assert after.activations < before.activations
    assert after._replace(activations=0) == before._replace(activations=0)


def test_one_product_makes_queries_keys_and_values():
    products = [op for op in fuse(network()).operations if isinstance(op, Linear)]
    stems = [tuple(name.split(".")[-1] for name in op.weights) for op in products[:4]]
    assert stems == [("q", "k", "v"), ("o",), ("gate", "up"), ("down",)]
    assert products[0].out_widths == (64, 32, 32)


def test_biases_stay_with_their_weights():
    first = next(
        op for op in fuse(network("Qwen2ForCausalLM")).operations if isinstance(op, Linear)
    )
    assert first.biases == tuple(f"{weight}_bias" for weight in first.weights)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_sum_but_the_last_is_folded_into_its_norm(architecture):
    program = network(architecture)
    folded = [op for op in fuse(program).operations if isinstance(op, AddRMSNorm)]
    assert len(folded) == 2 * 7 - 1
    sums = {op.total for op in folded}
    assert not any(isinstance(op, RMSNorm) and op.x in sums for op in fuse(program).operations)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_values_keep_their_names_and_widths(architecture):
    def values(program):
        return {value for op in program.operations for value in op.outputs}

    plain, fused = network(architecture), fuse(network(architecture))
    assert values(plain) <= values(fused)
    joint = {op.x for op in fused.operations if isinstance(op, Split)}
    assert {value.name for value in values(fused) - values(plain)} == joint


def test_norm_of_another_value_is_left_alone():
    b = Builder()
    x = b.embed("table", 10, 4)
    y = b.norm(x, "first", 1e-6)
    total = b.add(x, y)
    z = b.norm(y, "second", 1e-6)
    program = b.sample(
        b.linear(b.select_rows(b.add(total, z)), "head", 10), KVGroup(1, 1, 4), max_context=8
    )
    assert fuse(program) == program


def test_fusing_twice_changes_nothing_more():
    fused = fuse(network("Gemma3ForCausalLM"))
    assert fuse(fused) == fused
