"""What all client programs share: each prints one line of JSON per case, {"case", "value"} or {"case", "error"}.

They run in environments that know nothing of this project; whoever started them judges what they print.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from typing import Any

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
FORCED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER_QUESTION = [{"role": "user", "content": "How will the weather be in Rome in the next 3 days?"}]


def run(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Runs all cases in their order; one that fails does not stop the others."""
    for name, case in cases.items():
        try:
            line = {"case": name, "value": case()}
        except Exception:
            line = {"case": name, "error": traceback.format_exc()}
        print(json.dumps(line), flush=True)
