"""Steps that go wrong on purpose, for tests: an executor around the real one that reads a script.

    {"rules": [{"position": 57, "action": "kill", "once": "/tmp/x/57"}, {"token": 299, "action": "segv"}]}

A rule applies to a sequence of a step that meets all of its conditions:

    token       the step computes this token id            position   the step draws the token at this position
    phase       "prompt" (several tokens) or "decode"      when       while this file exists
    once        only for who creates this file: one engine of all, one time

and acts before the step (kill, segv, abort, stop: a signal to oneself; exit; raise; hang; slow: SLOW_SECONDS more)
or on its result: "nan"
as if that sequence's numbers were none, "fail" as if its worker had died while the engine lives on.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Literal

import msgspec

from engine_core.execution.executor_api import Executor
from engine_core.scheduler.step import ScheduledSequence, SequenceFailure, StepPlan, StepResult
from engine_core.types.errors import ConfigError

Action = Literal["kill", "segv", "abort", "stop", "exit", "raise", "hang", "slow", "nan", "fail"]
SLOW_SECONDS = 0.03
_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: Action
    token: int = -1
    position: int = -1
    phase: Literal["", "prompt", "decode"] = ""
    when: str = ""
    once: str = ""

    def meets(self, part: ScheduledSequence) -> bool:
        """True when the rule applies; creates `once`."""
        if self.token >= 0 and self.token not in part.token_ids:
            return False
        if self.position >= 0 and not (part.sample and part.start + len(part.token_ids) == self.position):
            return False
        if self.phase and self.phase != ("decode" if len(part.token_ids) == 1 else "prompt"):
            return False
        if self.when and not Path(self.when).exists():
            return False
        if self.once:
            try:
                Path(self.once).touch(exist_ok=False)
            except FileExistsError:
                return False
        return True


class _Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rules: tuple[_Rule, ...] = ()


class ScriptedFault(Exception):
    """A step that was to raise."""


class FaultyExecutor:
    """Implements Executor."""

    def __init__(self, executor: Executor, script: str) -> None:
        """Raises ConfigError when the script can't be read."""
        self._executor = executor
        try:
            self._rules = msgspec.json.decode(script, type=_Script).rules
        except msgspec.MsgspecError as exc:
            raise ConfigError(f"fault_script: {exc}") from exc

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs the plan, unless a rule has it otherwise."""
        failures = []
        for index, part in enumerate(plan.sequences):
            for rule in self._rules:
                if not rule.meets(part):
                    continue
                if rule.action in ("nan", "fail"):
                    failures.append(_failure(index, rule.action))
                else:
                    _suffer(rule.action)
        result = self._executor.execute(plan)
        return msgspec.structs.replace(result, failures=(*result.failures, *failures))


def _failure(index: int, action: str) -> SequenceFailure:
    if action == "nan":
        return SequenceFailure(index, "the logits hold NaN (scripted)")
    return SequenceFailure(index, "the worker is gone (scripted)", lost=True)


def _suffer(action: str) -> None:
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
    elif action == "exit":
        os._exit(1)
    elif action == "raise":
        raise ScriptedFault("a step raised as it was told")
    if action == "slow":
        time.sleep(SLOW_SECONDS)
    while action == "hang":
        time.sleep(0.1)
