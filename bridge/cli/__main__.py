"""`python -m bridge.cli`: the same as the `stagebridge` command."""

from bridge.cli import main

main()
