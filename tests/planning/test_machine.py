"""What stands beside a figure, in a checkout and outside of one."""

import platform
import subprocess
from pathlib import Path

from octavo.planning.machine import describe_machine


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def checkout(folder: Path) -> Path:
    """A repository in `folder` with one package that is not committed yet."""
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    git(folder, "init", "--quiet")
    return package


def test_versions_and_machine_are_told() -> None:
    described = describe_machine()
    assert described["python"] == platform.python_version()
    assert described["cpu"]
    assert int(described["cpus"]) >= 1


def test_commit_is_told_in_a_checkout_and_whether_files_differ(tmp_path: Path) -> None:
    package = checkout(tmp_path)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    commit = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert describe_machine(package)["commit"] == commit
    (package / "__init__.py").write_text("changed")
    assert describe_machine(package)["commit"] == commit + "+"


def test_package_that_is_only_installed_below_a_checkout_has_no_commit(tmp_path: Path) -> None:
    package = checkout(tmp_path)
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "somebody's own")
    assert "commit" not in describe_machine(package)


def test_package_outside_of_a_checkout_has_no_commit(tmp_path: Path) -> None:
    assert "commit" not in describe_machine(tmp_path)
