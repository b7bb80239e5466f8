"""Print a constraints file that pins what a pyproject.toml's users install to its lower bounds."""

import re
import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Read the file named on the command line; exit if a dependency has no lower bound.

    Every extra counts but `dev`, whose tools are those of the day.
    """
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    extras = [deps for name, deps in project["optional-dependencies"].items() if name != "dev"]
    for dependency in sum(extras, project["dependencies"]):
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", dependency)
        if match is None:
            sys.exit(f"{dependency!r} has no lower bound of the form name>=version.")
        print(f"{match[1]}=={match[2]}")


if __name__ == "__main__":
    main()
