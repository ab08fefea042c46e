"""``lightning-ring pack --check``: duplicates, near duplicates, and leaks between splits."""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from typing import Any

from lightning_ring.cli.sets.running import count


def check(options: argparse.Namespace, workers: int, bar: Any) -> int:
    """List what is found as CSV on standard output; 1 if that is anything."""
    from lightning_ring.data.sets.duplicates import find_duplicates
    from lightning_ring.host.file_names import printable

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    distance = None if options.exact else options.distance
    found = find_duplicates(options.paths, distance, options.split_by, workers, progress)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["kind", "distance", "split", "path", "label", "of_split", "of_path", "of_label"])
    for each in found:
        row = [each.kind, "equal" if each.distance is None else each.distance, *each.image, *each.of]
        writer.writerow([printable(cell) for cell in row])
    kinds = Counter(each.kind for each in found)
    other_class = sum(each.image.class_name != each.of.class_name for each in found)
    shown = ", ".join(count(number, kind) for kind, number in sorted(kinds.items()))
    what = f"{shown}; {other_class} of them in two classes" if found else "no image is there twice"
    print(f"{', '.join(map(str, options.paths))}: {what}", file=sys.stderr)
    return 1 if found else 0
