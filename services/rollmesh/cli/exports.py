"""``rollmesh export``: the trained model as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.common import RunFolderArgument, clear_errors, run_of
from rollmesh.report.model_export import export_model

OutArgument = Annotated[Path, typer.Argument(help="New folder for the model.", metavar="OUT")]
VersionOption = Annotated[int | None, typer.Option(help="Policy version; the newest by default.", min=0)]


def export(run: RunFolderArgument, out: OutArgument, version: VersionOption = None) -> None:
    """Write a policy of a run as a plain Hugging Face folder, with tokenizer and model card.

    Works on running, stopped and finished runs, without Redis; policies in an object store are downloaded. An adapter
    is merged into its base.

    Example: `rollmesh export runs/demo my-model`
    """
    with clear_errors():
        _, folder = run_of(run)
        exported = export_model(folder.path, out, version)
    typer.echo(f"policy version {exported.policy_version}, train step {exported.train_step}: {exported.folder}")
    typer.echo(f'to load it: transformers.AutoModelForCausalLM.from_pretrained("{exported.folder}")')
