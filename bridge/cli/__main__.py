"""The `stagebridge` command as `python -P -m bridge.cli`; without `-P` it refuses to run, and names
the command to use.
"""

from bridge.cli import main

main()
