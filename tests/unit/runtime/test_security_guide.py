"""The commands of docs/security.md, run as they stand there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from services.runtime.tls import MeshTls
from services.runtime.token import MeshToken

GUIDE = Path(__file__).parents[3] / "docs" / "security.md"


def test_its_commands_make_a_token_and_certificates_that_are_taken(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        done = subprocess.run(["bash", "-euc", block], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert len(MeshToken(tmp_path / "mesh-token").first) == 44
    tls = MeshTls(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt", "pdmesh.mesh")
    assert not tls.refresh()
    for name in ("mesh-token", "tls.key", "ca.key"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
