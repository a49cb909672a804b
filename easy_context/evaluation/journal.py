"""A JSONL file of the finished pieces of an evaluation, from which an interrupted run continues.

The first line holds the settings; every further line is one finished piece. A run with other settings is
refused, so that results of different settings never share a file.
"""

import json
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..common.files import write_whole

if TYPE_CHECKING:
    from .scorer import Scorer

Piece = TypeVar("Piece", bound=Hashable)


class Journal:
    """The file of a run. Only the first process reads and writes it; on the others `finished` stays empty.

    Attributes:
        path: the file.
        finished: the record of each finished piece, by its key.
    """

    def __init__(self, path: Path, piece: str, flag: str) -> None:
        """Describe the file without touching it.

        Args:
            path: the file.
            piece: the word for a piece in messages, such as "document".
            flag: the flag that sets the path, for messages.
        """
        self.path, self._piece = path, piece
        self.finished: dict[Any, dict] = {}
        self._not_ours = f"{path} is not a file of this script; choose another {flag}"
        self._remedy = f"choose another {flag}, or start anew with --resume none"
        self._again = "the same command"
        self._is_open = False

    def open(
        self,
        settings: dict,
        key: Callable[[dict], Hashable],
        is_finished: Callable[[dict], bool],
        model: str = "",
        resume: bool = True,
    ) -> None:
        """Create the file, or continue an earlier one.

        Args:
            settings: the settings that all records of a file share.
            key: returns the key that identifies a record.
            is_finished: returns whether a line's JSON value is a complete record.
            model: the model's name, for pictures; it may change when a run is continued.
            resume: continue an earlier file, if there is one, instead of replacing it.

        Raises:
            ValueError: the file has other settings, or is not a journal.
        """
        if int(os.environ.get("RANK", 0)):
            return
        self._key, self._is_finished = key, is_finished
        settings = json.loads(json.dumps(settings))  # in the form in which they are read back
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n") if resume and self.path.exists() else [""]
        except UnicodeDecodeError as reason:
            raise ValueError(self._not_ours) from reason
        if lines == [""]:
            write_whole(self.path, json.dumps({"model": model, "settings": settings}) + "\n")
        else:
            unfinished = lines.pop()  # A run that is killed while it writes leaves half a line.
            if not lines:  # The file is not ours: this script writes its first line atomically.
                lines = [unfinished]
            self._read(lines, settings)
            if unfinished:
                write_whole(self.path, "".join(line + "\n" for line in lines))
        if not resume:
            self._again += " with --resume auto"
        self._is_open = True

    def _read(self, lines: list[str], settings: dict) -> None:
        try:
            earlier = json.loads(lines[0])["settings"]
            known = earlier.keys()
        except (ValueError, KeyError, TypeError, AttributeError) as reason:
            raise ValueError(self._not_ours) from reason
        changed = sorted(
            key for key in {*known, *settings} if earlier.get(key, "absent") != settings.get(key, "absent")
        )
        if changed:
            what = "; ".join(f"{key}: {_shown(earlier, key)} then, {_shown(settings, key)} now" for key in changed)
            raise ValueError(f"{self.path} holds results of other settings ({what}); {self._remedy}")
        for number, line in enumerate(lines[1:], start=2):
            try:
                record = json.loads(line)
                if not self._is_finished(record):
                    raise ValueError(line)
                self.finished[self._key(record)] = record
            except (ValueError, LookupError, TypeError) as reason:
                raise ValueError(
                    f"{self.path}, line {number}: no finished {self._piece}; take the line out, {self._remedy}"
                ) from reason

    def add(self, record: dict) -> None:
        """Append a finished piece to the file."""
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.finished[self._key(record)] = record

    def remove(self) -> None:
        """Remove the file after the complete results have been written elsewhere."""
        self.path.unlink()

    def what_is_saved(self) -> str:
        """Return a sentence about what an interrupted run has saved and how to continue it."""
        if not self._is_open:
            return "nothing was saved"
        count = len(self.finished)
        return f"{count} {self._piece}{'s' * (count != 1)} saved in {self.path}; {self._again} goes on from there"


def _shown(settings: dict, key: str) -> str:
    """Return a setting as text; files of other versions may lack it."""
    return repr(settings[key]) if key in settings else "not recorded"


def missing_pieces(scorer: "Scorer", pieces: Iterable[Piece], journal: Journal) -> list[Piece]:
    """Return, on every process, the keys of `pieces` that the first process's journal lacks."""
    finished = scorer.from_first_rank(set(journal.finished))
    return [piece for piece in pieces if piece not in finished]


def run_pieces(
    scorer: "Scorer", pieces: list[Piece], work: Callable[[Piece], dict], journal: Journal
) -> Iterator[list[Piece]]:
    """Evaluate pieces, one in each data-parallel group at a time, and add their records to the journal.

    Args:
        scorer: the model.
        pieces: keys, from `missing_pieces`.
        work: evaluates a piece and returns its record.
        journal: the journal, which is open on the first process.

    Yields:
        The keys of the pieces that were evaluated together, after their records are in the file.
    """
    rank, groups = scorer.mesh.data_rank, scorer.mesh.data_size
    for first in range(0, len(pieces), groups):
        together = pieces[first : first + groups]
        records = scorer.from_every_group(work(together[rank]) if rank < len(together) else None)
        if scorer.is_first_rank:
            for record in filter(None, records):
                journal.add(record)
        yield together
