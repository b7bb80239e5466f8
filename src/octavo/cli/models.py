"""`octavo pull`, `list` and `rm`: the models in the cache folder.

Decides how they are shown. Invariant: `list` works without a network.
"""

from octavo.weights.catalog import MODELS
from octavo.weights.fetch import cache_folder, list_models, remove, resolve


def run_pull(reference: str) -> None:
    """Fetch a model and print where it lies."""
    print(resolve(reference))


def run_list() -> None:
    """Print the fetched models, then the short names that are not fetched yet."""
    fetched = list_models()
    names = {model.name for model in fetched}
    width = max(map(len, (*names, *MODELS)))
    for model in fetched:
        size, day = _megabytes(model.num_bytes), f"{model.fetched:%Y-%m-%d}"
        print(f"{model.name:{width}}  {size:>9}  {day}  {model.licence}")
    for entry in MODELS.values():
        if entry.name not in names:
            size = _megabytes(entry.num_bytes)
            print(f"{entry.name:{width}}  {size:>9}  not here    {entry.licence}")
    print(f"in {cache_folder()}")


def run_remove(name: str) -> None:
    """Delete a fetched model and print what that freed."""
    print(f"Removed {name}, {_megabytes(remove(name))}.")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
