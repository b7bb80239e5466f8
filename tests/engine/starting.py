"""How tests of a start ask for an engine that will not come to be."""

import pytest

from octavo import LLM
from octavo.errors import OctavoError

FEW = {"num_gpu_blocks_override": 8}


def refusal(path, kind, **settings):
    """The one line with which a start fails."""
    with pytest.raises(kind) as caught:
        LLM(str(path), **FEW, **settings)
    line = str(caught.value)
    assert isinstance(caught.value, OctavoError)
    assert "\n" not in line
    return line
