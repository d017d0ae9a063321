"""Pages of fidelity: what survives each ordered pair of stacks, counted by how and by effect, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import measuring
from dialect_pages import dialects
from markdown_text import Row, code, named, page, prose, sentence, slug, table, value

from bridge.stack.dialect import Dialect
from bridge.stack.rules import Effect, How
from bridge.translation import reference
from bridge.translation.reference import DialectPair, Opening, Passage

EFFECTS: tuple[Effect | None, ...] = (
    Effect.NUMBERS,
    None,
    Effect.ROUNDING,
    Effect.COST,
    Effect.NONE,
)


def pairs() -> list[DialectPair]:
    """All ordered pairs, by name."""
    return [
        reference.pair(source, target)
        for source in dialects()
        for target in dialects()
        if source is not target
    ]


FIDELITY = """What survives a translation, for each ordered pair of stacks, by the newest release of both. Counted from the rules,
each field of the source by the most that is certain about it.

- **exact**: one field becomes one field, and every value survives.
- **derived**: it is set in other words or by several fields together, and every value survives.
- **approximate**: some values survive and some do not; the page of the source says which. *Never lost* counts those among
  them that no generated config lost, whatever the rule warns of. Whether *your* value survives is what `stagebridge convert`
  measures: it goes there and back and compares.
- **dropped**: nothing there stands for it.
- **defaulted** counts fields of the *target*: the source has no word for them, and the target's default decides.

Fields that no plan field stands for are apart, as *own*: kernels, logs, data, checkpoints, the shape of the model. They have no
counterpart in any stack and stay behind wherever they go; *of them numbers* counts those that change the numbers of a run when
they are set to other than their default.

*Effect* is what losing a value does to the run: different numbers, the same up to rounding (another order of sums), memory or
speed, or nothing. For a few it *depends on the values*: loss scaling changes the numbers in fp16 and nothing in bf16. A field
left at a default that both stacks share loses nothing, whatever stands here."""


def matrix_page() -> str:
    """Counts of all pairs."""
    return page(
        "What survives: all pairs",
        FIDELITY,
        "## By how",
        matrix_table(),
        "![Fields by what becomes of them](matrix.svg)",
        "## By effect",
        prose(
            "Of the approximate, dropped and defaulted ones above: what a lost value does to the run. The first two columns are "
            "the fields to look at where numbers must not change; they are named on the page of the source."
        ),
        effect_table(),
        "## By source",
        _sources(),
    )


def matrix_table() -> str:
    """One row for each ordered pair: fields by how."""
    hows = ("exact", "derived", "approximate", "never lost", "dropped", "defaulted")
    return table(
        ("from", "to", "fields", *hows, "own", "of them numbers"), map(_matrix_row, pairs())
    )


HOWS = (How.EXACT, How.DERIVED, How.APPROXIMATE, How.DROPPED, How.DEFAULTED)
LOSING = (How.APPROXIMATE, How.DROPPED, How.DEFAULTED)


def _matrix_row(pair: DialectPair) -> Row:
    own = [passage for passage in pair.passages if not passage.kept]
    changing = sum(_matters(passage.effect) for passage in own)
    exact, derived, approximate, dropped, defaulted = (len(pair.fare(how)) for how in HOWS)
    numbers = (
        len(pair.passages),
        exact,
        derived,
        approximate,
        _safe(pair),
        dropped,
        defaulted,
        len(own),
        changing,
    )
    return (*_link(pair), *map(str, numbers))


def _link(pair: DialectPair) -> tuple[str, str]:
    return (
        f"[{pair.source.title}]({pair.source.name}.md#to-{slug(pair.target.title)})",
        pair.target.title,
    )


def effect_table() -> str:
    """One row for each ordered pair: what losing fields does to a run."""
    return table(("from", "to", *map(named, EFFECTS)), map(_effect_row, pairs()))


def _effect_row(pair: DialectPair) -> Row:
    fates = [effect for how in LOSING for effect in pair.fare(how)]
    return (*_link(pair), *(str(fates.count(effect)) for effect in EFFECTS))


def _sources() -> str:
    return "\n".join(
        f"- [{dialect.title} to the others]({dialect.name}.md)" for dialect in dialects()
    )


def source_page(source: Dialect) -> str:
    """What is lost on the way from one stack to each of the others."""
    there = [reference.pair(source, target) for target in dialects() if target is not source]
    return page(
        f"From {source.title} to the other stacks",
        prose(
            f"By the newest releases. [What the words mean](README.md); [every field](../dialects/{source.name}.md). "
            f"*(2 of 30)* behind a field that arrives with limits: 30 generated configs set it, and 2 of them lost its value. "
            f"Generated values are spread widely and are no likely ones."
        ),
        "## Stays behind everywhere",
        prose(_own_text(there[0])),
        _own(there[0]),
        *(part for pair in there for part in _way(pair)),
    )


def _own_text(pair: DialectPair) -> str:
    own = [passage for passage in pair.passages if not passage.kept]
    counts = [
        f"{sum(passage.effect is effect for passage in own)} {named(effect)}" for effect in EFFECTS
    ]
    kept = [count for count in counts if not count.startswith("0 ")]
    return (
        f"{len(own)} fields have no counterpart in any stack. By what losing them does: {', '.join(kept)}. "
        "They are kept in the sidecar for the way back. Those that change the numbers, if set to other than their default:"
    )


def _own(pair: DialectPair) -> str:
    reasons: dict[str, list[str]] = {}
    for passage in pair.passages:
        if not passage.kept and passage.effect in (None, Effect.NUMBERS):
            reasons.setdefault(passage.arrival.reasons[0], []).append(passage.path)
    return table(
        ("why it stays behind", "fields"),
        [(sentence(why), ", ".join(map(code, names))) for why, names in reasons.items()],
    )


def _way(pair: DialectPair) -> Iterator[str]:
    yield f"## To {pair.target.title}"
    yield _counts(pair)
    groups: tuple[tuple[str, Callable[[Passage], bool]], ...] = (
        (
            "Lost, and the numbers change",
            lambda one: one.how is How.DROPPED and _matters(one.effect),
        ),
        (
            "Some values are lost, and then the numbers change",
            lambda one: one.how is How.APPROXIMATE and _matters(one.effect),
        ),
        (
            "Lost or limited, with the same numbers but for rounding",
            lambda one: not one.lossless and not _matters(one.effect),
        ),
    )
    for title, wanted in groups:
        found = [passage for passage in pair.passages_with_meaning if wanted(passage)]
        if found:
            yield f"### {title}: {pair.source.title} to {pair.target.title}"
            yield table(("why", "fields", "if lost"), _by_reason(pair, found))
    yield from _left_open(pair)


def _matters(effect: Effect | None) -> bool:
    return effect in (None, Effect.NUMBERS)


def _counts(pair: DialectPair) -> str:
    rows = [(str(how), *(str(pair.fare(how).count(effect)) for effect in EFFECTS)) for how in HOWS]
    text = (
        f"{len(pair.passages_with_meaning)} fields stand for something that other"
        f" stacks know; *defaulted* ones are {pair.target.title}'s. "
        f"{pair.own} fields of {pair.target.title} have no counterpart and keep "
        f"[its defaults](../dialects/{pair.target.name}.md)."
    )
    return prose(text) + "\n\n" + table(("", *map(named, EFFECTS)), rows)


def _by_reason(pair: DialectPair, passages: Iterable[Passage]) -> Iterator[Row]:
    rows: dict[tuple[str, str], list[str]] = {}
    for passage in passages:
        why = " ".join(map(sentence, passage.arrival.reasons))
        always = [f"Always {code(str(value))}." for _, value in passage.arrival.fixed]
        rows.setdefault((" ".join((why, *always)).strip(), named(passage.effect)), []).append(
            _counted(pair, passage)
        )
    yield from ((why, ", ".join(fields), effect) for (why, effect), fields in rows.items())


def _counted(pair: DialectPair, passage: Passage) -> str:
    """A field, with how often it was lost among the generated configs that set it."""
    found = measuring.of(pair).get(passage.path)
    return f"{code(passage.path)} ({found})" if found and found.given else code(passage.path)


def _left_open(pair: DialectPair) -> Iterator[str]:
    if pair.openings:
        yield f"### Decided by a default: {pair.source.title} to {pair.target.title}"
        yield f"{pair.source.title} has no word for these; set them in what was written where they matter."
        yield table(("field", "plan", "default", "other values"), map(_open_row, pair.openings))


def _open_row(opening: Opening) -> Row:
    return (
        code(opening.path),
        code(opening.ours),
        value(opening.default) or "unset",
        named(opening.effect),
    )


# The plot

COLOURS = {
    "exact": "#1b7f5c",
    "derived": "#6fbf8f",
    "approximate, never lost": "#d3e08a",
    "approximate": "#f0b429",
    "dropped": "#c8553d",
}
BAR, GAP, LEFT, WIDE, TOP, APART = 16, 6, 240, 560, 92, 110
TITLE = "What survives a translation: fields of each pair of stacks by what becomes of them"
BELOW = "Fields that mean something to other stacks, newest releases; each bar is all of them, its number stands behind it"


def matrix_plot() -> str:
    """Fields that mean something to other stacks, by what becomes of them: one bar for each pair, as SVG."""
    bars = "\n".join(_bar(pair, row) for row, pair in enumerate(pairs()))
    size = f'width="{LEFT + WIDE + 60}" height="{TOP + len(pairs()) * (BAR + GAP) + 10}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    )
    titles = (
        f"<title>{TITLE}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="16" y="26" font-size="16" font-weight="bold">{TITLE}</text><text x="16" y="46" fill="#555">{BELOW}</text>',
    )
    return "\n".join((head, *titles, _legend(), bars, "</svg>\n"))


def _legend() -> str:
    starts = (LEFT, LEFT + APART, LEFT + 2 * APART, LEFT + 3 * APART + 60, LEFT + 4 * APART + 60)
    return "".join(
        f'<rect x="{x}" y="62" width="12" height="12" fill="{colour}"/><text x="{x + 18}" y="72">{name}</text>'
        for x, (name, colour) in zip(starts, COLOURS.items(), strict=True)
    )


def _bar(pair: DialectPair, row: int) -> str:
    top, start, parts = TOP + row * (BAR + GAP), float(LEFT), []
    for count, colour in zip(_shares(pair), COLOURS.values(), strict=True):
        width = WIDE * count / len(pair.passages_with_meaning)
        label = (
            f'<text x="{start + width / 2:.1f}" y="{top + 12}" text-anchor="middle">{count}</text>'
            if width > 12
            else ""
        )
        parts.append(
            f'<rect x="{start:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>{label}'
        )
        start += width
    name = f"{pair.source.title} → {pair.target.title}"
    total = f'<text x="{LEFT + WIDE + 8}" y="{top + 12}">{len(pair.passages_with_meaning)}</text>'
    return f'<text x="{LEFT - 8}" y="{top + 12}" text-anchor="end">{name}</text>{"".join(parts)}{total}'


def _shares(pair: DialectPair) -> tuple[int, ...]:
    exact, derived, approximate, dropped = (
        len(pair.fare(how)) for how in HOWS if how is not How.DEFAULTED
    )
    return exact, derived, _safe(pair), approximate - _safe(pair), dropped


def _safe(pair: DialectPair) -> int:
    """Fields with limits that no generated config lost."""
    return sum(counts.given > 0 and not counts.lost for counts in measuring.of(pair).values())


def pages() -> dict[str, str]:
    """The matrix with its plot, and one page for each source."""
    sources = {f"fidelity/{dialect.name}.md": source_page(dialect) for dialect in dialects()}
    return {"fidelity/README.md": matrix_page(), "fidelity/matrix.svg": matrix_plot(), **sources}
