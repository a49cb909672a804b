"""Select the files of an input, and list those that are not read."""

from collections import Counter
from pathlib import Path

from ...common.files import OPENERS, format_suffix
from ..datasets import choose_split, is_saved_dataset, saved_parts
from .folders import is_own

TEXT_SUFFIXES = (".txt", ".text", ".md")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = TEXT_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES
ABOUT_THE_FOLDER = ("README.MD", "SOURCES.MD")
OWN, SAVED = "in folders of prepare_data.py", "of saved datasets"
LINK, BROKEN_LINK, NO_SUFFIX = "links to folders", "broken links", "without a suffix"
MOST_KINDS = 12


def list_files(path: Path) -> list[Path]:
    """Return the files of a source in reading order; for a dataset of `save_to_disk` the folder of its train split.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: the file type is not supported, the folder has no supported file, or the dataset no train split.
    """
    supported = f"supported are {', '.join(SUFFIXES)}, each also as {', '.join(OPENERS)} (parquet as it is)"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a file, a folder or hub:DATASET")
    if path.is_file():
        if format_suffix(path) not in SUFFIXES:
            raise ValueError(f"{path} has an unsupported file type; {supported}")
        return [path]
    if is_saved_dataset(path):
        return [path]
    if _is_dataset(path):
        return [path / choose_split([part.name for part in saved_parts(path)], str(path))]
    files, left_out = _sorted_out(path)
    if not files:
        found = f" (left out: {describe_files(left_out)})" if left_out else ""
        raise ValueError(f"no usable file below {path}{found}; {supported}")
    return files


def files_left_out(path: Path) -> dict[str, int]:
    """Return how many files of each kind below a folder are not read; nothing for a file or a saved dataset.

    The kinds are suffixes, names such as .DS_Store and README.md, and some groups: the files of saved datasets, and
    those in folders of prepare_data.py.
    """
    return dict(_sorted_out(path)[1].most_common()) if path.is_dir() and not _is_dataset(path) else {}


def _is_dataset(path: Path) -> bool:
    return is_saved_dataset(path) or (path / "dataset_dict.json").exists()


def describe_files(kinds: dict[str, int]) -> str:
    """Return the kinds with their numbers, the most frequent first."""
    most = Counter(kinds).most_common()
    others = sum(number for _, number in most[MOST_KINDS:])
    shown = [*most[:MOST_KINDS], *([("others", others)] if others else [])]
    return ", ".join(f"{kind} {number}" for kind, number in shown)


def _sorted_out(folder: Path) -> tuple[list[Path], Counter[str]]:
    """Return the files below a folder that are read, and the numbers of those left out by kind."""
    files: list[Path] = []
    left_out: Counter[str] = Counter()
    groups = {folder: OWN} if is_own(folder) else {}  # of each folder in which nothing is read
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            group = groups.get(path.parent) or (OWN if is_own(path) else SAVED if _is_dataset(path) else None)
            groups |= {path: group} if group else {}
        elif path.parent in groups:
            left_out[groups[path.parent]] += 1
        elif path.name.upper() in ABOUT_THE_FOLDER:
            left_out[path.name] += 1
        elif path.is_file() and format_suffix(path) in SUFFIXES:
            files.append(path)
        else:
            left_out[_other_kind(path)] += 1
    return files, left_out


def _other_kind(path: Path) -> str:
    if path.is_dir():
        return LINK
    if not path.exists():
        return BROKEN_LINK
    compression = path.suffix.lower() if path.suffix.lower() in OPENERS else ""
    return format_suffix(path) + compression or (path.name if path.name.startswith(".") else NO_SUFFIX)
