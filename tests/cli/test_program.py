"""`octavo program`: the table, from the configuration alone."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from octavo.engine.load import open_model
from octavo.models.registry import build_program
from octavo.program.program import Program
from tests.cli.conftest import TINY, Octavo


@pytest.fixture
def config_alone(tmp_path: Path) -> Path:
    shutil.copy(TINY / "config.json", tmp_path)
    return tmp_path


def program() -> Program:
    return build_program(open_model(str(TINY)).config)


def test_configuration_is_enough(octavo: Octavo, config_alone: Path) -> None:
    done = octavo("program", str(config_alone))
    assert (done.code, done.err) == (0, "")
    assert done == octavo("program", str(TINY))


def test_totals_are_the_programs(octavo: Octavo, config_alone: Path) -> None:
    out = octavo("program", str(config_alone), "--context", "100").out
    plain = program()
    num_parameters = sum(map(math.prod, plain.parameters.values()))
    assert f"{num_parameters:,} parameters" in out
    assert f"{plain.flops_per_token(100):,} flops for one token that sees 100 positions" in out
    assert f"{plain.kv_bytes_per_token():,.0f} bytes of KV cache per token" in out


def test_flops_grow_with_the_context(octavo: Octavo, config_alone: Path) -> None:
    near, far = (
        octavo("program", str(config_alone), "--context", context).out for context in ("1", "1000")
    )
    assert near != far


def test_plain_shows_the_operations_before_they_are_fused(
    octavo: Octavo, config_alone: Path
) -> None:
    fused, plain = (octavo("program", str(config_alone), *o).out for o in ((), ("--plain",)))
    assert "GatedActivation" not in fused
    assert "GatedActivation" in plain
    assert f"{len(program().operations)} operations" in plain
    flops = re.compile(r"[\d,]+ flops for")
    assert flops.findall(fused) == flops.findall(plain)


def test_layers_that_are_equal_are_shown_once(octavo: Octavo, config_alone: Path) -> None:
    config = json.loads((config_alone / "config.json").read_text())
    (config_alone / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    table = octavo("program", str(config_alone), "--plain").out.partition("\n\n")[0]
    # The first begins with the embedding, and in the last rows without logits end.
    assert re.findall(r"^\d\S*", table, re.MULTILINE) == ["0", "1-3", "4"]


def test_weights_are_not_read(octavo: Octavo, config_alone: Path) -> None:
    (config_alone / "model.safetensors").write_bytes(b"not weights")
    assert octavo("program", str(config_alone)).code == 0
