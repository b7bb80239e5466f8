"""Every engine setting: its good and bad values, and what is said of a wrong name."""

import dataclasses

import pytest

from octavo.config import EngineConfig, choices_of, default_of
from octavo.errors import SettingError

FIELDS = {setting.name: setting for setting in dataclasses.fields(EngineConfig)}
MINIMA = {name: f.metadata["minimum"] for name, f in FIELDS.items() if "minimum" in f.metadata}
CHOICES = {name: choices_of(f) for name, f in FIELDS.items() if choices_of(f)}
COUNTS = [name for name in MINIMA if FIELDS[name].type in (int, int | None)]
OPTIONAL = {name for name, f in FIELDS.items() if default_of(f) is None}


def refusal(**settings):
    with pytest.raises(SettingError) as caught:
        EngineConfig(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_setting_has_a_help_text_and_a_default_that_is_good():
    EngineConfig()
    for setting in FIELDS.values():
        assert setting.metadata["help"].endswith(".")
        assert EngineConfig(**{setting.name: default_of(setting)}) == EngineConfig()


@pytest.mark.parametrize("name", MINIMA)
def test_a_number_below_its_minimum_is_refused_with_name_value_and_limit(name):
    wide = {"max_num_batched_tokens": 4096, "max_num_seqs": 1}
    minimum = MINIMA[name]
    assert getattr(EngineConfig(**{**wide, name: minimum}), name) == minimum
    for value in (minimum - 1, -(10**9)):
        assert refusal(**{name: value}) == f"{name} must be at least {minimum}, not {value}."


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [1.5, "8", True, [], float("nan"), 10.0])
def test_a_number_of_another_type_is_refused(name, value):
    assert refusal(**{name: value}).startswith(f"{name} must be int")


@pytest.mark.parametrize("name", sorted(MINIMA.keys() - COUNTS))
@pytest.mark.parametrize("value", ["8", True, []])
def test_a_time_may_be_any_number_but_nothing_else(name, value):
    assert getattr(EngineConfig(**{name: 1.5}), name) == 1.5
    assert getattr(EngineConfig(**{name: 8}), name) == 8
    assert refusal(**{name: value}).startswith(f"{name} must be float")


@pytest.mark.parametrize("name", CHOICES)
def test_a_setting_with_choices_takes_each_of_them_and_lists_them_otherwise(name):
    for choice in CHOICES[name]:
        assert getattr(EngineConfig(**{name: choice}), name) == choice
    for value in ("other", None, 3, True, ["auto"], "x" * 10_000):
        line = refusal(**{name: value})
        assert line.startswith(f"{name} must be one of {', '.join(map(str, CHOICES[name]))}")
        assert len(line) < 250


@pytest.mark.case("V15")
def test_the_documented_block_sizes_are_the_choices_and_divide_a_segment():
    assert CHOICES["block_size"] == (16, 32, 64, 128, 256)
    assert all(256 % size == 0 for size in CHOICES["block_size"])


@pytest.mark.parametrize("name", sorted(set(FIELDS) - set(MINIMA) - set(CHOICES)))
def test_texts_switches_and_the_seed_have_their_type_alone(name):
    default = default_of(FIELDS[name])
    wrong = {bool: [0, "true", None], int: ["1", None, True, 1.0]}.get(type(default), [5, True])
    for value in wrong:
        assert refusal(**{name: value}).startswith(f"{name} must be ")


@pytest.mark.parametrize("name", sorted(set(FIELDS) - OPTIONAL))
def test_null_is_only_for_settings_that_are_resolved_at_the_start(name):
    assert name in refusal(**{name: None})


def test_a_step_must_hold_a_token_of_every_running_sequence():
    line = refusal(max_num_seqs=64, max_num_batched_tokens=63)
    assert "max_num_batched_tokens (63) must be at least max_num_seqs (64)" in line
    assert EngineConfig(max_num_seqs=64, max_num_batched_tokens=64).max_num_seqs == 64


class TestFromDict:
    def test_known_names_become_settings(self):
        config = EngineConfig.from_dict({"block_size": 16, "seed": -5})
        assert (config.block_size, config.seed) == (16, -5)
        assert EngineConfig.from_dict({}) == EngineConfig()

    @pytest.mark.parametrize(
        ("wrong", "meant"),
        [
            ("max_modle_len", "max_model_len"),
            ("enable_prefix_cache", "enable_prefix_caching"),
            ("blocksize", "block_size"),
        ],
    )
    def test_an_unknown_name_is_refused_with_the_closest(self, wrong, meant):
        with pytest.raises(SettingError, match=rf"no setting '{wrong}'\. Did you mean '{meant}'"):
            EngineConfig.from_dict({wrong: 1})

    def test_a_name_like_no_other_is_refused_without_a_guess(self):
        with pytest.raises(SettingError) as caught:
            EngineConfig.from_dict({"zzzz": 1})
        assert str(caught.value) == "There is no setting 'zzzz'."


def test_settings_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().block_size = 16
