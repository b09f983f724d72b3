"""Checkpoints section: the storage of policies and trainer states."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from rollmesh.config.section import Secret, Section

OBJECT_STORES = ("s3://", "gs://")


class CheckpointConfig(Section):
    """Policies and trainer state."""

    folder: str | None = None
    """Shared folder, or an object store: s3://BUCKET/PREFIX (extra ``s3``) or gs://BUCKET/PREFIX (extra ``gs``), with
    the usual credentials of its clients from the environment; null is ``checkpoints`` in the run folder."""
    cache_folder: str | None = None
    """With an object store: folder of this node into which policies are pulled, once for all its processes; null is
    ``checkpoints`` in the run folder."""
    cache_policies: int = Field(default=3, ge=1)
    """With an object store: pulled policies that a node keeps in addition to those used in the last ten minutes."""
    parallel_transfers: int = Field(default=8, ge=1, le=64)
    """With an object store: files of one policy or state that a process transfers at once."""
    anchor_every_versions: int = Field(default=1, ge=1, le=100)
    """With an object store: upload every so-many-th policy version in full, and the others as the difference to the
    version before, where that is smaller than half of the weights; 1 uploads all in full. For ``model.dtype:
    bfloat16``: float32 weights change in every version."""
    object_store: dict[str, Any] = Field(default_factory=dict)
    """With an object store: options of its fsspec file system, for example {"endpoint_url": "https://minio:9000"}."""
    keep_last: int = Field(default=6, ge=2)
    """Number of published policies to keep; pinned policies, those in use and that of a requested rollback are kept
    too."""
    state_every_steps: int = Field(default=1, ge=1)
    """Train steps between two commits of the trainer state; steps in between are replayed after a crash. Must be 1 with
    trainer.algorithm.old_logprobs=stage_end."""
    secret: Secret = None
    """HMAC key of the manifests; null creates one per run, in the run folder."""

    @property
    def remote(self) -> bool:
        """True when ``folder`` is an object store."""
        return self.folder is not None and "://" in self.folder

    @model_validator(mode="after")
    def _the_folder_is_one_that_is_known(self) -> Self:
        if self.remote and not str(self.folder).startswith(OBJECT_STORES):
            raise ValueError(
                f"checkpoints.folder={self.folder}: expected a folder, or one of {', '.join(OBJECT_STORES)}"
            )
        if self.object_store and not self.remote:
            raise ValueError(
                f"checkpoints.object_store is for object stores only, not for checkpoints.folder={self.folder}"
            )
        if self.anchor_every_versions > 1 and not self.remote:
            raise ValueError(
                f"checkpoints.anchor_every_versions={self.anchor_every_versions} is for object stores: in a shared "
                "folder generators read the weights themselves; set 1, or checkpoints.folder=s3://... or gs://..."
            )
        for name in ("key", "secret", "token", "password"):
            if name in self.object_store:
                raise ValueError(
                    f"checkpoints.object_store.{name}: credentials do not belong in a run file; set them in the "
                    "environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...)"
                )
        return self
