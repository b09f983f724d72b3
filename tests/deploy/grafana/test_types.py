"""The dashboards against Grafana's own TypeScript types: unknown fields, wrong enums and wrong shapes are errors."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .dashboard_files import FILES, ROOT, load, panels

PACKAGE = ROOT / "deploy" / "grafana" / "types" / "package.json"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rollmesh"
PANEL_MODULES = {
    "timeseries": ("timeseries", "TimeSeries"),
    "stat": ("stat", "Stat"),
    "bargauge": ("bargauge", "BarGauge"),
    "heatmap": ("heatmap", "Heatmap"),
    "state-timeline": ("statetimeline", "StateTimeline"),
    "table": ("table", "Table"),
}
CUSTOM_FIELDS = {"timeseries", "heatmap", "state-timeline"}
"""Panel types whose fields have options of their own."""
HEAD = r"""
import type { Dashboard } from '@grafana/schema';
// Enums as the strings that they are in JSON.
type Plain<T> = T extends string ? `${T}` : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
// A panel fills in what its options leave out.
type Some<T> = T extends (infer U)[] ? Some<U>[] : T extends object ? { [K in keyof T]?: Some<T[K]> } : T;
"""


@pytest.fixture(scope="module")
def modules() -> Path:
    """A folder with Grafana's types and the TypeScript compiler; kept between runs."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not on PATH: Grafana's TypeScript types cannot be installed")
    folder = CACHE / f"grafana-types-{hashlib.sha256(PACKAGE.read_bytes()).hexdigest()[:12]}"
    if not (folder / "installed").exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE, folder)
        command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot install Grafana's types: {done.stderr.strip()[-300:]}")
        (folder / "installed").touch()
    return folder


def statements() -> Iterator[str]:
    """One TypeScript statement for every dashboard, and for the options and fields of every panel."""
    for name, (module, prefix) in PANEL_MODULES.items():
        path = f"@grafana/schema/dist/esm/raw/composable/{module}/panelcfg/x/{prefix}PanelCfg_types.gen"
        yield f"import type {{ Options as {module}Options }} from '{path}';"
        if name in CUSTOM_FIELDS:
            yield f"import type {{ FieldConfig as {module}Fields }} from '{path}';"
    for file in FILES:
        dashboard = load(file)
        for mark in dashboard["annotations"]["list"]:
            assert mark.pop("expr")  # the types leave out what a datasource adds to an annotation
        yield satisfies(dashboard, "Plain<Dashboard>")
        for panel in panels(dashboard):
            module, _ = PANEL_MODULES[panel["type"]]
            yield satisfies(panel.get("options", {}), f"Some<Plain<{module}Options>>")
            custom = panel["fieldConfig"]["defaults"].get("custom") if "fieldConfig" in panel else None
            if custom:
                assert panel["type"] in CUSTOM_FIELDS, panel["title"]
                yield satisfies(custom, f"Some<Plain<{module}Fields>>")


def satisfies(value: dict[str, Any], kind: str) -> str:
    return f"({json.dumps(value)}) satisfies {kind};"


def compiled(modules: Path, folder: Path, lines: list[str]) -> subprocess.CompletedProcess[str]:
    (folder / "node_modules").symlink_to(modules / "node_modules")
    source = folder / "dashboards.ts"
    source.write_text(HEAD + "\n".join(lines) + "\n")
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--target", "esnext", "--module", "esnext"]
    command = ["node", modules / "node_modules" / "typescript" / "bin" / "tsc", *flags]
    command += ["--moduleResolution", "bundler", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.timeout(1000)
def test_grafanas_types_accept_every_dashboard_and_every_panel(modules: Path, tmp_path: Path) -> None:
    lines = list(statements())
    done = compiled(modules, tmp_path, lines)
    assert done.returncode == 0, done.stdout[:4000]
    print(f"\n{sum('satisfies' in line for line in lines)} objects satisfy Grafana's types")


@pytest.mark.timeout(1000)
def test_grafanas_types_refuse_an_unknown_option_and_a_wrong_word(modules: Path, tmp_path: Path) -> None:
    """So that a green run means something."""
    lines = [line for line in statements() if line.startswith("import")]
    lines.append(satisfies({"legend": {"displayMode": "list", "placemnt": "bottom"}}, "Some<Plain<timeseriesOptions>>"))
    lines.append(satisfies({"drawStyle": "lines"}, "Some<Plain<timeseriesFields>>"))
    done = compiled(modules, tmp_path, lines)
    assert done.returncode != 0
    assert "placemnt" in done.stdout
    assert "drawStyle" in done.stdout or '"lines"' in done.stdout
