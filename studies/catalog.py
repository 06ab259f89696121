"""Find the studies that there are, in folders under a root or in one storage."""

from __future__ import annotations

from pathlib import Path

import optuna

from studies.storage import STORE_FILE, connect, one_line_errors, sqlite_path, sqlite_url


def find_studies(root: Path, url: str | None) -> tuple[list[tuple[str, str]], list[str]]:
    """List the studies, by name.

    Args:
        root: Folder of the studies; looked through where there is no URL.
        url: A storage that holds them all.

    Returns:
        (name, URL of the storage) of each, and a line for each file under the root that cannot
        be read.

    Raises:
        ValueError: There is no such root or storage, or the storage cannot be read. One line,
            without passwords.
    """
    if url is not None:
        path = sqlite_path(url)
        if path is not None and not path.exists():
            raise ValueError(f"there are no studies: {path} does not exist")
        return [(name, url) for name in _names(url)], []
    if not root.is_dir():
        raise ValueError(f"there are no studies: the folder {root} does not exist")
    found, broken = [], []
    for path in sorted(root.glob(f"*/{STORE_FILE}")):
        try:
            here = sqlite_url(path)
            found += [(name, here) for name in _names(here)]
        except ValueError as error:
            broken.append(str(error))
    return found, broken


def _names(url: str) -> list[str]:
    storage = connect(url, create=False)
    with one_line_errors(url):
        return sorted(optuna.get_all_study_names(storage))
