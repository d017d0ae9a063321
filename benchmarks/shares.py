"""In what share of generated configs each field is off its default, of those whose release has it: a table for each dialect."""

from __future__ import annotations

import argparse
import csv
import sys

import compat
from bridge.testing.shares import Share, shares


def main() -> None:
    """Print the rarest fields of each dialect, or write all of them as CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "dialects", nargs="*", default=compat.names(), help="all of them unless named"
    )
    parser.add_argument(
        "--configs", type=int, default=2000, help="configs to draw for each dialect"
    )
    parser.add_argument("--rarest", type=int, default=10, help="fields to print")
    parser.add_argument("--out", help="CSV file for the shares of all fields")
    options = parser.parse_args()
    found = {name: shares(compat.load(name), options.configs) for name in options.dialects}
    for name, table in found.items():
        show(name, table, options.rarest)
    if options.out:
        write(options.out, found)


def show(name: str, table: dict[str, Share], rarest: int) -> None:
    """The fields that are set least often."""
    ordered = sorted(table.items(), key=lambda item: item[1].value)
    below = sum(share.value < 0.01 for share in table.values())
    print(f"{name}: {len(table)} fields, {below} below 1 %; the rarest:")
    for path, share in ordered[:rarest]:
        print(f"  {share.value:7.2%}  {share.off:5} of {share.having:5}  {path}")


def write(path: str, found: dict[str, dict[str, Share]]) -> None:
    """One row for each field of each dialect."""
    with open(path, "w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(("dialect", "field", "off_default", "configs_that_have_it", "share"))
        rows.writerows(
            (name, p, s.off, s.having, f"{s.value:.4f}")
            for name, table in found.items()
            for p, s in table.items()
        )


if __name__ == "__main__":
    sys.exit(main())
