"""Entry point of the command `pdmesh`: probes take a short way, everything else goes to services.cli.main."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line of this process and ends it with its exit code."""
    if sys.argv[1:2] == ["health"]:
        from services.cli import health

        sys.exit(health.main(sys.argv[2:]))
    from services.cli.main import main as whole

    whole()
