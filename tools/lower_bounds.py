"""Print a constraints file that pins every dependency of a pyproject.toml to its lower bound."""

import re
import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Read the file named on the command line; raise if a dependency has no lower bound."""
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    for dependency in project["dependencies"]:
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", dependency)
        if match is None:
            sys.exit(f"{dependency!r} has no lower bound of the form name>=version.")
        print(f"{match[1]}=={match[2]}")


if __name__ == "__main__":
    main()
