"""``report.csv``: what was left out of a packing, and what was changed in it, by name."""

from __future__ import annotations

import csv
from io import StringIO

HEADER = b"what,name,detail\n"


def report_row(what: str, name: str, detail: str) -> bytes:
    """A line of the report. ``what``: "left out", "converted" or "empty class"."""
    line = StringIO()
    csv.writer(line, lineterminator="\n").writerow([what, name, detail])
    return line.getvalue().encode("utf-8", "surrogateescape")  # a name may hold bytes that are no UTF-8
