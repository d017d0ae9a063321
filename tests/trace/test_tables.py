"""The tables of docs/faults.md fit each other, and what is planted."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
NAMES = {
    "plain torch, one rank": "plain",
    "DistributedDataParallel": "DDP",
    "torch's pipelining": "pipelining",
}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below that heading."""
    text = PAGE.read_text().partition(f"## {heading}")[2].partition("\n## ")[0]
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return found[2:]


def kind(stack: str) -> str:
    """The stack, without its layout."""
    return re.sub(r" ZeRO.*|,.*", "", NAMES.get(stack, stack.removesuffix(" engine")))


def test_each_of_at_least_eight_stacks_takes_two_lines_at_most_and_has_four_faults() -> None:
    found = rows("Lines that a training changes")
    assert len(found) >= 8
    for stack, lines, how, faults, alone in found:
        # An import, and the call that the table quotes; none where the stack's own engine is asked for it.
        assert int(lines) == (0 if how.startswith("`train") else 2), stack
        assert int(faults) >= 4 and int(alone) <= int(faults), stack


def test_the_counts_of_both_tables_and_of_the_text_are_those_of_the_rows() -> None:
    every = rows("Every fault")
    stacks, caught = (
        Counter(kind(row[1]) for row in every),
        Counter(kind(row[1]) for row in every if row[5] != "*no*"),
    )
    told = {
        kind(stack): (int(faults), int(alone))
        for stack, _, _, faults, alone in rows("Lines that a training changes")
    }
    assert told == {stack: (count, caught[stack]) for stack, count in stacks.items()}
    text = " ".join(PAGE.read_text().split())
    assert f"{len(every)} faults are planted" in text
    assert f"and {caught.total()} are caught without a twin" in text
    verdicts = Counter(row[3] for row in every)
    assert (
        f"right in {verdicts['right']} and broad in {verdicts['broad']}, misleading in none" in text
    )
    assert verdicts.keys() == {"right", "broad"}


def test_every_fault_that_is_planted_has_its_row() -> None:
    from tests.trace.planting import known

    assert {row[0]: row[1] for row in rows("Every fault")} == {
        name: fault.stack for name, fault in known().items()
    }


LAYER = re.compile(r"(inner\.|model\.)?(blocks?\.?\d|tok|pos|norm|head|embedding|decoder)[\w.]*")


def kind_of_sentence(claim: str) -> str:
    """A claim without the names, numbers and ranks that it speaks of."""
    text = re.sub(r" on rank \d+", "", re.sub(r"\b\d[\d.e-]*", "0", LAYER.sub("L", claim)))
    return re.sub(r"L(, L)*( and 0 more)?", "L", text)


def test_each_fault_takes_few_sentences_for_right() -> None:
    """Each fault against each sentence that is claimed of any: what it takes for its cause is that sentence, or one more."""
    from tests.trace.planting import known

    claims = {row[0]: row[4] for row in rows("Every fault")}
    taken = {
        name: {
            kind_of_sentence(claim) for claim in claims.values() if re.search(fault.cause, claim)
        }
        for name, fault in known().items()
    }
    assert len({kind_of_sentence(claim) for claim in claims.values()}) > 50
    assert {name: kinds for name, kinds in taken.items() if not 0 < len(kinds) < 3} == {}
    assert [
        name for name, claim in claims.items() if not re.search(known()[name].cause, claim)
    ] == []


def test_what_a_fault_says_alone_is_that_fault_or_follows_from_it() -> None:
    from tests.trace.planting import Outcome

    for name, _, _, verdict, claim, alone in rows("Every fault"):
        found = [
            (id, int(step), "", "remark" if remark else "fault")
            for id, step, remark in re.findall(r"([\w-]+) \((\d+)\)(\?)?", alone)
        ]
        outcome = Outcome(name, "", claim, found, ())
        assert outcome.strangers == [], name
        assert outcome.verdict == verdict, name
