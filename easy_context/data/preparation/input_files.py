"""The files of an input: which are read, in which order, and which are left out."""

from collections import Counter
from pathlib import Path

from ...common.files import OPENERS, format_suffix
from .folders import MARK, is_own, is_own_file

TEXT_SUFFIXES = (".txt", ".text", ".md")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = TEXT_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES
ABOUT_THE_FOLDER = ("README.MD", "SOURCES.MD")
OWN, SAVED = "of prepare_data.py", "of saved datasets"
LINK, BROKEN_LINK, NO_SUFFIX = "links to folders", "broken links", "without a suffix"
MOST_KINDS = 12


def list_files(path: Path, flag: str = "--input") -> list[Path]:
    """Return the files of a source in reading order; a dataset saved with `save_to_disk` is returned as its folder.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: an unsupported file type, a folder without a supported file, or a saved dataset of several splits.
    """
    supported = f"supported are {', '.join(SUFFIXES)}, each also as {', '.join(OPENERS)} (parquet as it is)"
    if not path.exists():
        raise FileNotFoundError(f"{flag}: {path} does not exist; give a file, a folder or hub:DATASET")
    if path.is_file():
        if format_suffix(path) not in SUFFIXES:
            raise ValueError(f"{flag}: {path} has an unsupported file type; {supported}")
        return [path]
    if (path / "state.json").exists():
        return [path]
    if (path / "dataset_dict.json").exists():
        raise ValueError(f"{flag}: {path} holds several splits; name the folder of one, such as {path}/train")
    files, left_out = _sorted_out(path)
    if not files:
        found = f" (left out: {describe_files(left_out)})" if left_out else ""
        raise ValueError(f"{flag}: no usable file below {path}{found}; {supported}")
    return files


def files_left_out(path: Path) -> dict[str, int]:
    """Return how many files of each kind below a folder are not read; nothing for a file or a saved dataset.

    The kinds are suffixes, names such as .DS_Store and README.md, and some groups: the files of saved datasets, and of
    prepare_data.py's own outputs.
    """
    if not path.is_dir() or (path / "state.json").exists():
        return {}
    return dict(_sorted_out(path)[1].most_common())


def describe_files(kinds: dict[str, int]) -> str:
    """Return the kinds with their numbers, the most frequent first."""
    most = Counter(kinds).most_common()
    others = sum(number for _, number in most[MOST_KINDS:])
    shown = [*most[:MOST_KINDS], *([("others", others)] if others else [])]
    return ", ".join(f"{kind} {number}" for kind, number in shown)


def is_other_kind(kind: str) -> bool:
    """Whether files of this kind are left out because nothing here reads them."""
    return kind.upper() not in ABOUT_THE_FOLDER and kind not in (OWN, SAVED)


def _sorted_out(folder: Path) -> tuple[list[Path], Counter[str]]:
    paths = sorted(folder.rglob("*"))
    own = [path.parent for path in paths if path.name in (MARK, "report.json") and is_own(path.parent)]
    saved = {
        path.parent for path in paths if path.name == "state.json" and (path.parent / "dataset_info.json").exists()
    }
    files, left_out = [], Counter()
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            continue
        if any(is_own_file(one, path) for one in own):
            kind = OWN
        elif path.parent in saved or path.name == "dataset_dict.json":
            kind = SAVED
        elif path.name.upper() in ABOUT_THE_FOLDER:
            kind = path.name
        elif path.is_file() and format_suffix(path) in SUFFIXES:
            files.append(path)
            continue
        else:
            kind = _other_kind(path)
        left_out[kind] += 1
    return files, left_out


def _other_kind(path: Path) -> str:
    if path.is_dir():
        return LINK
    if not path.exists():
        return BROKEN_LINK
    compression = path.suffix.lower() if path.suffix.lower() in OPENERS else ""
    return format_suffix(path) + compression or (path.name if path.name.startswith(".") else NO_SUFFIX)
