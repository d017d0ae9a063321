"""One rank of `verify`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from bridge.api.access import limit_access
from bridge.api.source import Source
from bridge.api.verify import Own, VerifyOptions, make_own_pair, make_pair, read_model_config
from bridge.engine.backends import backends
from bridge.engine.environment import detect, end_process
from bridge.engine.joining import join
from bridge.engine.rows import Rows
from bridge.errors import BridgeError
from bridge.files.progress import listening
from bridge.stack.dialect import Config
from bridge.trace.batch_file import read_batch as kept
from bridge.verify.judge import verify
from bridge.verify.local import MARK, Fields
from bridge.verify.on_batch import Given, judge_on_batch
from bridge.verify.rank_engines import load_engines


def warm(text: str) -> None:
    """Load the engines that may be used, before ranks are forked."""
    spec = json.loads(text)
    # An engine that is loaded after the fork is loaded once by every rank.
    on = [name for task in spec for name in (task["options"].get("own") or {}).get("on") or ()]
    load_engines(
        {
            *on,
            *(name for task in spec for name in (task["options"]["to"], task["source"]["dialect"])),
        }
    )


def main(text: str) -> None:
    """Verify one file after the other on one rank. The first rank prints the progress and the
    reports.
    """
    tasks, here, out = json.loads(text), detect(), sys.stdout

    def tell(**words: Any) -> None:
        if here.rank == 0:
            # Stacks print to stdout as they like: ours goes there alone, and marked.
            print(MARK + json.dumps(words, allow_nan=False), file=out, flush=True)

    with redirect_stdout(sys.stderr):
        for task in tasks:
            with listening(lambda count, total: tell(at=[count, total])):
                fields = _judge_job(
                    Source(**task["source"]),
                    _options_of(task["options"]),
                    lambda line: tell(note=line),
                )
            tell(found=fields)
    end_process(here.world)


def _options_of(values: Mapping[str, Any]) -> VerifyOptions:
    own = values["own"]
    if own is not None:
        own = Own(**{**own, "other": Source(**own["other"]), "on": own["on"] and tuple(own["on"])})
    return VerifyOptions(**{**values, "own": own})


def _judge_own(source: Source, options: VerifyOptions, own: Own, note: Any) -> Fields:
    """The report on two configs of a user's own."""

    pair, engines = make_own_pair(source, own, options.ranks)
    folder = Path(own.model)
    rows = Rows.of(own.batch, kept(Path(own.batch)).tensors)
    sample = Given(folder, read_model_config(Source(str(folder / "config.json"))), rows)
    return {
        **judge_on_batch(pair, engines, sample, options.steps, note).fields(),
        "judged_release": "",
    }


def _judge_job(source: Source, options: VerifyOptions, note: Any) -> Fields:

    here = detect()
    join(here)
    try:
        with limit_access(source):
            if options.own:
                return _judge_own(source, options, options.own, note)
            pair = make_pair(source, options)
            fields = verify(
                pair, backends(options.to, source.dialect), options.steps, options.padded, note
            ).fields()
            return {**fields, "judged_release": _release_line(pair.target)}
    except BridgeError as error:
        return {"verdict": "not run", "problems": list(error.problems)}


def _release_line(target: Config) -> str:
    """Return a line that names the target release of the translation, if it is not the default
    release of `convert`; else an empty text.
    """
    title, newest = target.dialect.title, target.dialect.newest
    if target.version == newest:
        return ""
    advice = f"`convert` writes for {newest} unless given --to-version {target.version}"
    return f"The translation is for {title} {target.version}, which is installed here; {advice}."


if __name__ == "__main__":
    main(sys.argv[1])
