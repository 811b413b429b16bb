"""The history as a table in a file."""

from __future__ import annotations

import csv
import io
from os import PathLike

from ..history import Record
from ..storage.files import check_path, replace_file
from .callback import Callback, TrainerLike, check_place


class CSVLogger(Callback):
    """Writes the whole history to a CSV file after each epoch, a header line first.

    The file is replaced as a whole, so a resumed run repeats no line.  Numbers are written so that
    they read back exactly; what an epoch lacks is left empty.

    Raises:
        DtypeError, ConfigurationError: ``path`` names no file.
        StorageError: at the start of a fit: its folder is not there; later: it cannot be written.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = check_path("CSVLogger path", path)

    def begin(self, trainer: TrainerLike) -> None:
        check_place(self, self.path)

    def epoch_end(self, trainer: TrainerLike, record: Record) -> None:
        table = io.StringIO()
        writer = csv.DictWriter(table, trainer.history.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(trainer.history)
        replace_file(f"table {self.path}", self.path, table.getvalue().encode())
