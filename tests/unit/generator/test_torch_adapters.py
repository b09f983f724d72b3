"""Adapters in the torch engine: rows of several versions in one batch, each exact, and folders held to the run's."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.config.model import AdapterConfig
from rollmesh.errors import ConfigError, EngineError
from rollmesh.generator.engines import call_limits
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.policy_folders import AdaptedLayers, AdapterSettings, adapted_layers, read_shapes
from rollmesh.generator.engines.torch.adapters import BASE, AdapterStack
from rollmesh.generator.engines.torch.speculation import Gate
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.types import FinishReason

from ...kit.adapters import ALL_LINEAR, ALPHA, RANK, change_config, change_tensors, merge, write_adapter
from ...kit.generation import Rollout, Running, collect, hf_logprobs, make_call, prompt_ids
from ...kit.run_files import run_config
from .conftest import CONFIGS, ModelMaker
from .made_steps import always_draft

_LAYER = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"


class Versions:
    """Adapters above a base, by version, and full folders that compute the same."""

    def __init__(self, root: Path, base: Path, targets: tuple[str, ...] = ALL_LINEAR) -> None:
        self.base = base
        self._root, self._targets = root, targets

    def folder(self, version: int) -> Path:
        path = self._root / f"adapter-{version}"
        return path if path.exists() else write_adapter(path, self.base, version, targets=self._targets)

    def merged(self, version: int) -> Path:
        if version == 0:
            return self.base
        path = self._root / f"merged-{version}"
        return path if path.exists() else merge(path, self.base, self.folder(version))

    async def serve(self, engine: TorchEngine, version: int) -> None:
        folder = self.folder(version) if version else self.base
        await engine.stage(folder, version)
        await engine.load(folder, version, OnNewVersion.NEXT_SLICE)

    def check(self, rollout: Rollout, version: int) -> None:
        """Every token is of this version, with its log-probability recomputed from scratch."""
        assert rollout.stamps == {(version, version)}
        wanted = hf_logprobs(self.merged(version), rollout.ids)
        np.testing.assert_allclose(rollout.logprobs, wanted[len(rollout.call.context_ids) - 1 :], atol=2e-4)


@pytest.fixture
def versions(tmp_path: Path, model_folder: ModelMaker) -> Versions:
    return Versions(tmp_path, model_folder("qwen3"))


@pytest.fixture
def adapter_engine(engine_of: Callable[..., Any]) -> Callable[..., Any]:
    """``await adapter_engine("qwen3")``: an engine that was started with the base as version 0."""

    async def make(name: str = "qwen3", *, target: Any = "all_linear", kept: int = 2, **options: Any) -> Any:
        config = AdapterConfig(rank=RANK, alpha=ALPHA, target=target)
        return await engine_of(name, adapter=AdapterSettings(config=config, kept_versions=kept), **options)

    return make


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("targets", [ALL_LINEAR, ("q_proj", "v_proj", "down_proj")], ids=["all", "some"])
async def test_an_adapter_computes_what_its_merged_weights_compute(
    adapter_engine, model_folder, tmp_path, name, targets
):
    versions = Versions(tmp_path, model_folder(name), targets)
    engine = await adapter_engine(name, target="all_linear" if targets == ALL_LINEAR else targets)
    await versions.serve(engine, 1)
    ids = prompt_ids(3, 40)
    (scores,) = await engine.score([ids])
    np.testing.assert_allclose(scores, hf_logprobs(versions.merged(1), ids), atol=2e-4)
    assert np.abs(scores - hf_logprobs(versions.base, ids)).max() > 0.1
    versions.check(await collect(engine, make_call()), 1)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("speculation", ["off", "history"])
async def test_calls_finish_on_the_version_they_began_with_next_to_calls_of_others(
    adapter_engine, versions, graphs, speculation, monkeypatch
):
    monkeypatch.setattr(call_limits, "_HOLD_SECONDS", 600.0)
    monkeypatch.setattr(Gate, "measure", always_draft)
    engine = await adapter_engine(cuda_graphs=graphs, speculation=speculation)
    context = prompt_ids(4, 30)  # the same for all: a cache shared between versions would show
    await collect(engine, make_call("before", context, max_new_token_count=200))
    running = []
    for version in range(6):  # three more than there are places at first
        if version:
            await versions.serve(engine, version)
        # The limit holds a call half-way until the last version is loaded.
        call = make_call(f"v{version}", context, max_new_token_count=200, unacknowledged_token_limit=104)
        running.append(await Running(engine, [call]).begun())
    assert engine.status().running_count == 6
    for version, (rollout,) in enumerate(await asyncio.gather(*(one.end_saved(engine) for one in running))):
        assert rollout.reason is FinishReason.LENGTH
        versions.check(rollout, version)
    drafts = engine.status().speculation
    assert drafts is None or drafts.drafted_token_total > 0


async def test_a_call_that_loses_its_cache_is_prefilled_again_under_its_own_version(adapter_engine, versions):
    engine = await adapter_engine(kv_token_capacity=600)
    # Admission expects too little of the long calls: it has seen nothing but short responses.
    await asyncio.gather(*(collect(engine, make_call(f"s{i}", max_new_token_count=20)) for i in range(8)))
    calls = [make_call(f"t{i}", prompt_ids(i, 6 + i), max_new_token_count=180 + 5 * i) for i in range(8)]
    running = [await Running(engine, [call]).begun() for call in calls[:4]]
    await versions.serve(engine, 1)
    late = Running(engine, calls[4:])
    for one in running:
        versions.check(*await one.end(), 0)
    for rollout in await late.end():
        versions.check(rollout, 1)
    assert engine.status().preemption_total > 0


async def test_an_adapter_that_is_not_numbers_is_refused_and_running_calls_stay_exact(adapter_engine, versions):
    engine = await adapter_engine()
    await versions.serve(engine, 1)
    broken = write_adapter(versions.base.parent / "broken", versions.base, 7)
    change_tensors(broken, {_LAYER: torch.full((48, RANK), float("nan"))})
    with pytest.raises(EngineError, match=r"down_proj\.lora_B\.weight has values that are not finite"):
        await engine.stage(broken, 2)
    versions.check(await collect(engine, make_call()), 1)


async def test_an_adapter_whose_numbers_overflow_leaves_the_other_versions_exact(adapter_engine, versions, tmp_path):
    engine = await adapter_engine()
    await versions.serve(engine, 1)
    huge = write_adapter(tmp_path / "huge", versions.base, 7, size=1e30)
    await engine.stage(huge, 2)
    assert not np.isfinite((await engine.score([prompt_ids(0, 20)], 2))[0]).all()
    versions.check(await collect(engine, make_call()), 1)


async def test_what_an_engine_cannot_load_with_adapters_is_named(adapter_engine, engine_of, versions):
    plain = await engine_of("qwen3")
    with pytest.raises(EngineError, match="on_new_version=next_slice: an engine without model.adapter cannot"):
        await plain.load(versions.folder(1), 1, OnNewVersion.NEXT_SLICE)
    with pytest.raises(ConfigError, match="no linear layer qkv_proj"):
        await adapter_engine(target=("qkv_proj",))


def test_a_version_that_is_not_loaded_has_no_place_and_is_never_taken_for_the_base():
    key, cpu = (0, "down"), torch.device("cpu")
    stack = AdapterStack({key: (4, 2, 4)}, torch.float32, cpu, base_version=3, rows=1)
    stack.reserve(2)
    stack.put(5, {key: (torch.ones(4, 2), torch.ones(2, 4))})
    assert (stack.place_of(3), stack.place_of(5)) == (BASE, 0)
    stack.drop(5)
    for version in (0, 5):
        with pytest.raises(EngineError, match=f"policy version {version} is not loaded"):
            stack.place_of(version)


_FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def base(model_folder: ModelMaker) -> Path:
    return model_folder("qwen3")


@pytest.fixture
def layers(base: Path) -> AdaptedLayers:
    return adapted_layers(read_shapes(base), AdapterConfig(rank=RANK, alpha=ALPHA))


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base, seed=1)


def test_all_linear_is_every_linear_layer_of_the_blocks_and_nothing_else(base: Path, layers: AdaptedLayers) -> None:
    assert layers.names == tuple(sorted(ALL_LINEAR))
    assert len(layers.layers) == 14 and all(".layers." in layer for layer in layers.layers)
    assert layers.tensors[_FIRST] == (RANK, 48)


def test_an_adapter_of_the_run_passes_with_unset_fields_of_other_methods(adapter: Path, layers: AdaptedLayers) -> None:
    layers.check(adapter)
    change_config(adapter, use_rslora=False, modules_to_save=None, alpha_pattern={})
    layers.check(adapter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 8}, r"r=8, model\.adapter\.rank is 4"),
        ({"lora_alpha": 16}, r"lora_alpha=16, model\.adapter\.alpha is 8"),
        ({"target_modules": ["q_proj"]}, r"target_modules=\['q_proj'\], model\.adapter\.target=all_linear"),
        ({"target_modules": "all-linear"}, "target_modules='all-linear' is refused: .* a list of names"),
        ({"peft_type": "VERA"}, "peft_type='VERA' is refused: only low-rank adapters are applied"),
        ({"use_rslora": True}, "use_rslora=True is refused"),
        ({"use_dora": True}, "use_dora=True is refused"),
        ({"bias": "all"}, "bias='all' is refused"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is refused"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern=.* is refused"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices=.* is refused"),
    ],
)
def test_a_config_that_an_engine_would_serve_as_another_adapter_is_refused_by_its_field(
    adapter: Path, layers: AdaptedLayers, fields: dict[str, Any], message: str
) -> None:
    change_config(adapter, **fields)
    with pytest.raises(EngineError, match=message):
        layers.check(adapter)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({_FIRST: None}, "q_proj.lora_A.weight is missing; the adapter is incomplete"),
        ({_FIRST: torch.ones(8, 48)}, r"has shape \[8, 48\], the base with model.adapter.rank=4 needs \[4, 48\]"),
        ({_FIRST: torch.ones(RANK, 64)}, r"has shape \[4, 64\], .* above the base that it was trained on"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(RANK, 48)}, "lm_head.lora_A.weight belongs to no layer"),
        (
            {_FIRST.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): torch.ones(RANK, 48)},
            "experts.0.up_proj.lora_A.weight belongs to no layer of model.adapter.target=all_linear",
        ),
    ],
)
def test_tensors_that_the_run_does_not_train_are_refused_by_name(
    adapter: Path, layers: AdaptedLayers, changed: dict[str, torch.Tensor | None], message: str
) -> None:
    change_tensors(adapter, changed)
    with pytest.raises(EngineError, match=message):
        layers.check(adapter)


def test_added_tokens_and_torn_files_are_refused(adapter: Path, layers: AdaptedLayers) -> None:
    (adapter / "added_tokens.json").write_text('{"<new>": 61}')
    with pytest.raises(EngineError, match="an adapter cannot add tokens"):
        layers.check(adapter)
    (adapter / "added_tokens.json").unlink()
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(EngineError, match="cannot be read"):
        layers.check(adapter)


def test_a_target_that_the_base_lacks_and_experts_are_refused_at_the_start(base: Path) -> None:
    shapes = read_shapes(base)
    with pytest.raises(ConfigError, match="no linear layer qkv_proj; it has down_proj, gate_proj"):
        adapted_layers(shapes, AdapterConfig(target=("qkv_proj",)))
    shapes["model.layers.1.mlp.experts.0.up_proj.weight"] = (64, 48)
    with pytest.raises(ConfigError, match=r"experts\.0\.up_proj, but experts cannot be adapted"):
        adapted_layers(shapes, AdapterConfig())
    with pytest.raises(ConfigError, match=r"model\.adapter\.rank=512: above the size of .*; choose at most"):
        adapted_layers(read_shapes(base), AdapterConfig(rank=512))
    named = adapted_layers(shapes, AdapterConfig(target=("q_proj", "v_proj")))
    assert named.names == ("q_proj", "v_proj")


def test_an_engine_keeps_the_versions_of_the_staleness_bound_and_two_more() -> None:
    assert AdapterSettings.from_config(run_config()) is None
    settings = AdapterSettings.from_config(run_config("model.adapter.rank=4 schedule.max_staleness=3"))
    assert settings is not None and settings.kept_versions == 5
