"""lm-eval and EvalScope, on tasks that lie in tests/clients/data."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.clients.conftest import Clients
from tests.support.clients import DATA, Ended, environment
from tests.support.hf_reference import logits

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

TOLERANCE = 1e-4
"""Per token, between logarithms of probabilities in float32."""


async def lm_eval(clients: Clients, kind: str, path: str, tasks: Sequence[str], **settings: Any) -> Path:
    """Runs lm-eval; the folder with what it has written."""
    folder = clients.folder / f"lm-eval-{kind}"
    shutil.copytree(DATA / "lm_eval", folder)
    told = {"model": "default", "base_url": f"{clients.url}{path}", "num_concurrent": 2, "max_retries": 1, **settings}
    command = [
        environment("evaluation", "lm_eval"), "run", "--model", kind, "--include_path", str(folder),
        "--model_args", ",".join(f"{name}={value}" for name, value in told.items()), "--tasks", ",".join(tasks),
        "--output_path", str(folder / "out"), "--log_samples",
        *(["--apply_chat_template"] if "chat" in kind else ["--batch_size", "4"]),
    ]  # fmt: skip
    # Its tasks name their files relative to where it runs.
    ended: Ended = await clients.run(["env", "-C", str(folder), *command], 500.0)
    assert ended.code == 0, str(ended)
    return folder / "out"


def samples(out: Path, task: str) -> list[dict[str, Any]]:
    (path,) = out.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows(model: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Row i: what transformers gives each token to follow tokens[: i + 1], as logarithms."""
    return torch.log_softmax(logits(model, tokens), -1)


async def test_lm_eval_scores_as_transformers_does(clients: Clients) -> None:
    """Batches of token ids with echo and logprobs: choices, whole texts, and whether the model would say it itself."""
    tasks = ("pdmesh_choices", "pdmesh_texts", "pdmesh_answers")
    settings = {"tokenizer": clients.model, "tokenizer_backend": "huggingface", "tokenized_requests": True}
    out = await lm_eval(clients, "local-completions", "/completions", tasks, **settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(clients.model), local_files_only=True)
    likeliest = 0
    found = samples(out, "pdmesh_choices")
    assert len(found) == 6 and sum(len(one["resps"]) for one in found) == 19
    for sample in found:
        for given, ((value, greedy),) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            begin = tokenizer(given["arg_0"])["input_ids"]
            whole = tokenizer(given["arg_0"] + given["arg_1"])["input_ids"]
            assert whole[: len(begin)] == begin, "a choice begins with a token of its own"
            scores, chosen = rows(clients.model, whole)[len(begin) - 1 : -1], whole[len(begin) :]
            wanted = sum(float(row[token]) for row, token in zip(scores, chosen, strict=True))
            assert float(value) == pytest.approx(wanted, abs=TOLERANCE * len(chosen)), given
            assert greedy == str([int(row.argmax()) for row in scores] == chosen), given
            likeliest += greedy == "True"
    assert likeliest, "one of the choices is what the model would say itself"
    for sample in samples(out, "pdmesh_texts"):
        ids = tokenizer(sample["doc"]["text"])["input_ids"]
        scores = rows(clients.model, [tokenizer.bos_token_id, *ids])[:-1]
        wanted = sum(float(row[token]) for row, token in zip(scores, ids, strict=True))
        ((value,),) = sample["resps"]
        assert float(value[0] if isinstance(value, list) else value) == pytest.approx(wanted, abs=TOLERANCE * len(ids))
        assert math.isfinite(wanted) and len(ids) > 10
    assert "Paris" in samples(out, "pdmesh_answers")[0]["resps"][0][0]


async def test_lm_eval_generates_in_chats(clients: Clients) -> None:
    settings = {"tokenized_requests": False}
    out = await lm_eval(clients, "local-chat-completions", "/chat/completions", ["pdmesh_answers"], **settings)
    answers = [sample["resps"][0][0] for sample in samples(out, "pdmesh_answers")]
    assert "Paris" in answers[0] and all(answers) and not any("\n" in answer for answer in answers)


async def test_evalscope_evaluates(clients: Clients) -> None:
    """The command as users have it, with max_tokens beyond any context; and where a data set of that form lies."""
    place = json.dumps({"gsm8k": {"local_path": str(DATA / "gsm8k")}})
    command = [
        environment("evalscope", "evalscope"), "eval", "--model", "default", "--api-url", clients.url,
        "--datasets", "gsm8k", "--eval-batch", "32", "--generation-config", '{"max_tokens":65535}',
        "--dataset-args", place,
    ]  # fmt: skip
    ended = await clients.run(command, 800.0)
    assert ended.code == 0, str(ended)
    (path,) = clients.folder.rglob("outputs/*/predictions/default/gsm8k_main.jsonl")
    outputs = [json.loads(line)["model_output"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(outputs) == 3 and all(one["error"] is None for one in outputs)
    for one in outputs:
        (choice,) = one["choices"]
        assert choice["message"]["content"] and choice["stop_reason"] in ("stop", "max_tokens")
        assert one["usage"]["input_tokens"] > 200, "four worked examples and the question"
    (report,) = clients.folder.rglob("outputs/*/reports/default/gsm8k.json")
    (metric,) = json.loads(report.read_text(encoding="utf-8"))["metrics"]
    assert metric["num"] == 3 and 0 <= metric["score"] <= 1
