"""Make the golden values: what an independent implementation (transformers) computes.

Run it in its own environment (see README.md):

    python tests/golden/make_goldens.py tiny                       # tiny/<name>/
    python tests/golden/make_goldens.py sampling                   # sampling.npz, sampling.json
    python tests/golden/make_goldens.py real --model FILE.gguf --name NAME    # real/<name>.json
"""

import argparse
from pathlib import Path

import numpy as np
from reference import (
    check_cache,
    check_float64,
    check_rope_scaling,
    check_window,
    greedy,
    load,
    logits_of,
    use_determinism,
)
from tiny_models import NUM_ORDINARY_TOKENS, TinyModel, tiny_models, write_checkpoint
from transformers import PreTrainedModel

HERE = Path(__file__).resolve().parent
NUM_DECODED = 12
FULLY_STORED = 100  # a longer prompt's logits are stored at some positions only


def stored_positions(length: int) -> np.ndarray:
    """All positions of a short prompt; every 16th and the last 8 of a longer one."""
    every = np.arange(length)
    if length <= FULLY_STORED:
        return every
    return every[(every % 16 == 0) | (every >= length - 8)]


def random_prompts(tiny: TinyModel) -> list[list[int]]:
    rng = np.random.default_rng(1000 + tiny.seed)
    return [rng.integers(0, NUM_ORDINARY_TOKENS, n).tolist() for n in tiny.prompt_lengths]


def prompt_goldens(model: PreTrainedModel, ids: list[int]) -> dict[str, np.ndarray]:
    """One prompt's prefill logits and greedy continuation."""
    positions = stored_positions(len(ids))
    tokens, rows = greedy(model, ids, NUM_DECODED)
    check_cache(model, ids, tokens)
    return {
        "ids": np.array(ids, np.int32),
        "prefill_positions": positions.astype(np.int32),
        "prefill_logits": logits_of(model, ids)[positions],
        "decode_ids": tokens,
        "decode_logits": rows,
    }


def check_sound(model: PreTrainedModel, ids: list[int]) -> str:
    """Run the checks that apply to this model; a line that says what they found."""
    found = [f"float64 {check_float64(model, ids):.1e}"]
    if getattr(model.config, "sliding_window", None) is not None:
        found.append(f"window matters by {check_window(model, ids):.2f}")
    if model.config.rope_parameters.get("rope_type", "default") != "default":
        found.append(f"rope scaling matters by {check_rope_scaling(model, ids):.2f}")
    return ", ".join(found)


def make_tiny() -> None:
    for tiny in tiny_models():
        folder = HERE / "tiny" / tiny.name
        write_checkpoint(tiny, folder)
        model = load(folder)
        arrays: dict[str, np.ndarray] = {}
        for number, ids in enumerate(random_prompts(tiny)):
            goldens = prompt_goldens(model, ids)
            arrays |= {f"prompt{number}_{key}": value for key, value in goldens.items()}
        np.savez_compressed(folder / "logits.npz", **arrays)
        print(f"{tiny.name}: {check_sound(model, ids)}; {describe(arrays)}")


def describe(arrays: dict[str, np.ndarray]) -> str:
    """The spread of the logits and the smallest top-2 margin of any decoded token."""
    rows = np.concatenate([a for key, a in arrays.items() if key.endswith("decode_logits")])
    top = np.sort(rows, axis=1)
    return f"logit std {rows.std():.2f}, smallest margin {(top[:, -1] - top[:, -2]).min():.1e}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tiny", help="tiny checkpoints of every family, with their logits")
    commands.add_parser("sampling", help="filtered distributions of the tiny llama's logits")
    real = commands.add_parser("real", help="greedy tokens of a published GGUF model")
    real.add_argument("--model", type=Path, required=True, help="the GGUF file")
    real.add_argument("--name", required=True, help="the golden is written to real/NAME.json")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    use_determinism()
    if arguments.command == "tiny":
        make_tiny()
    elif arguments.command == "sampling":
        from sampling_reference import make_sampling

        make_sampling(HERE)
    else:
        from real_models import make_real

        make_real(arguments.model, arguments.name, HERE / "real")


if __name__ == "__main__":
    main()
