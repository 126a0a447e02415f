"""What holds for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How fast a machine is at the moment decides no test.
settings.register_profile("pdmesh", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pdmesh")

_HERE = Path(__file__).parent
_LONG = ("faults", "mesh", "deploy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of long tests begin first: the short ones then fill what is left of each worker's time."""
    items.sort(key=lambda item: item.path.relative_to(_HERE).parts[0] not in _LONG)
