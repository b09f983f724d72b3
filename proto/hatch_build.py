"""Build hook: generate the gRPC stubs from the .proto files at install time.

The stubs land in ``services/rollmesh/v1`` (git-ignored): the .proto files are the only source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateStubs(BuildHookInterface):
    """Runs protoc over ``proto/rollmesh/v1/*.proto`` before the wheel (or the editable install) is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        from importlib.resources import files

        from grpc_tools import protoc

        root = Path(self.root)
        out = root / "services"
        target = out / "rollmesh" / "v1"
        target.mkdir(parents=True, exist_ok=True)
        (target / "__init__.py").write_text('"""Generated from proto/rollmesh/v1; do not edit."""\n')
        protos = sorted(str(p) for p in (root / "proto" / "rollmesh" / "v1").glob("*.proto"))
        well_known = str(files("grpc_tools") / "_proto")
        args = ["protoc", f"-I{root / 'proto'}", f"-I{well_known}"]
        args += [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main([*args, *protos]) != 0:
            raise RuntimeError(f"protoc failed for {protos}")
