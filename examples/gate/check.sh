#!/usr/bin/env bash
# What the action runs: the gate over STAGEBRIDGE_PATHS, shown beside the lines of a change, and as SARIF where a file is named.
set -u
set -f # patterns are stagebridge's own
# Up to the end, not to the end of the first line: an input of a workflow may have one path to a line.
read -r -d '' -a paths <<<"${STAGEBRIDGE_PATHS:-.}"
read -r -d '' -a options <<<"${STAGEBRIDGE_OPTIONS:-}"
stagebridge check "${paths[@]}" ${options[@]+"${options[@]}"} --format github
code=$?
if [ -n "${STAGEBRIDGE_SARIF:-}" ]; then
    stagebridge check "${paths[@]}" ${options[@]+"${options[@]}"} --format sarif >"$STAGEBRIDGE_SARIF.part"
    # Wrong options write nothing, and the upload of an empty file would hide their error.
    if [ -s "$STAGEBRIDGE_SARIF.part" ]; then mv "$STAGEBRIDGE_SARIF.part" "$STAGEBRIDGE_SARIF"; else rm "$STAGEBRIDGE_SARIF.part"; fi
fi
exit "$code"
