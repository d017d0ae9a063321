#!/usr/bin/env bash
# What the action runs: the gate over STAGEBRIDGE_PATHS, shown beside the lines of a change, and as SARIF where a file is named.
set -u
set -f # patterns are stagebridge's own
read -r -a paths <<<"${STAGEBRIDGE_PATHS:-.}"
read -r -a options <<<"${STAGEBRIDGE_OPTIONS:-}"
stagebridge check "${paths[@]}" ${options[@]+"${options[@]}"} --format github
code=$?
if [ -n "${STAGEBRIDGE_SARIF:-}" ]; then
    stagebridge check "${paths[@]}" ${options[@]+"${options[@]}"} --format sarif >"$STAGEBRIDGE_SARIF"
fi
exit "$code"
