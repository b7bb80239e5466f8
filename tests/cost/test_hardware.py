"""The table of machines."""

import pytest

from octavo.cost.hardware import MACHINES, machine_named
from octavo.errors import SettingError


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_names_its_source(name: str) -> None:
    machine = MACHINES[name]
    assert machine.name == name
    assert len(machine.source) > 20
    assert min(*machine.products.values(), machine.bandwidth, machine.memory_bytes) > 0


def test_names_are_found_whatever_their_case() -> None:
    assert machine_named("H100") is MACHINES["h100"]


def test_unknown_machine_is_an_error_that_names_the_closest_and_all() -> None:
    with pytest.raises(SettingError, match=r"'h1000'.*Did you mean 'h100'") as caught:
        machine_named("h1000")
    assert all(name in str(caught.value) for name in MACHINES)


def test_a_format_of_groups_has_the_rate_of_its_bits() -> None:
    machine = MACHINES["a100"]
    assert machine.rate("int4_group") == machine.rate("int4") == 624e12
    assert machine.rate("attention") == machine.rate("bf16") == 312e12
    # Weights of 8 bits meet activations of 16: two products of 8.
    assert machine.rate("int8") == 312e12


def test_below_the_ridge_memory_is_the_limit() -> None:
    machine = MACHINES["a100"]
    peaks = machine.efficiency.products * 312e12, machine.efficiency.memory * 2.039e12
    assert machine.ridge() == pytest.approx(peaks[0] / peaks[1])
