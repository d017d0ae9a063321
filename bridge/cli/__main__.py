"""`python -P -m bridge.cli`: the same as the `stagebridge` command; without `-P` it refuses, and names that of `stagebridge`."""

from bridge.cli import main

main()
