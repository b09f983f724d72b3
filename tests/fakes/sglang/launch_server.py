"""HTTP of the stand-in server; run as ``python -m sglang.launch_server`` with this folder's parent on PYTHONPATH."""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from aiohttp import web
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from .decoder import Decoder, Request

_MOST_MASK_TOKENS = 4096


class Server:
    """Endpoints and their gate: while paused, new requests are held and /ready says no."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.decoder = Decoder(options.model_path, options.weight_version, options.max_running_requests)
        self.model_path = options.model_path
        self.open = asyncio.Event()
        self.open.set()
        self.known: dict[str, Request] = {}
        self.adapter_ids: dict[str, int] = {}
        """Number of the load of each adapter: a part of the key of its prefix cache."""
        self.adapter_loads = 0
        self.adapter_folders: dict[str, Path] = {}
        """Folder of every adapter that was ever loaded."""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.authorise], client_max_size=1 << 26)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/pause_generation", self.pause)
        app.router.add_post("/continue_generation", self.resume)
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_post("/load_lora_adapter", self.load_adapter)
        app.router.add_post("/unload_lora_adapter", self.unload_adapter)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/ready", self.ready)
        app.on_startup.append(self._begin)
        return app

    async def _begin(self, app: web.Application) -> None:
        self.task = asyncio.create_task(self.decoder.run())
        self.task.add_done_callback(lambda task: os._exit(1))

    @web.middleware
    async def authorise(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key = self.options.admin_api_key
        if key and request.path != "/ready" and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def generate(self, http: web.Request) -> web.Response:
        body = await http.json()
        rid, ids = body["rid"], body["input_ids"]
        if rid in self.known:
            return _wrong(f"Duplicate request ID: {rid}")
        if len(ids) >= self.options.context_length - 6:
            return _wrong(f"The input ({len(ids)} tokens) is longer than the model's context length")
        if body["sampling_params"]["temperature"] < 0:
            return _wrong("temperature must be a non-negative finite number")
        top_k, wants_mask = body["sampling_params"].get("top_k", -1), bool(body.get("return_sampling_mask"))
        if wants_mask and not 1 <= top_k <= _MOST_MASK_TOKENS:
            return _wrong(f"return_sampling_mask requires finite 1 < top_k <= {_MOST_MASK_TOKENS}; got top_k={top_k}")
        adapter = body.get("lora_path") or ""
        if adapter and adapter not in self.decoder.adapters:
            if adapter not in self.adapter_folders:
                return _wrong(f"Got LoRA adapter that has never been loaded: {adapter}")
            self._add_adapter(adapter, self.adapter_folders[adapter])  # as the real one
        request = Request(
            rid=rid,
            adapter=adapter,
            input_ids=ids,
            params=body["sampling_params"],
            extra_key=f"{body.get('extra_key') or ''}|{self.adapter_ids.get(adapter, '')}",
            wants_mask=wants_mask,
            start=body.get("logprob_start_len", -1),
            top_k=body.get("top_logprobs_num") or 0,
            done=asyncio.get_running_loop().create_future(),
        )
        self.known[rid] = request
        try:
            await self.open.wait()
            if max(ids) >= self.decoder.vocab_size or min(ids) < 0:
                print("index out of range in self", file=sys.stderr, flush=True)
                os._exit(1)  # as the real one: its scheduler dies of it
            self.decoder.add(request)
            return web.json_response(await request.done)
        finally:
            del self.known[rid]

    async def abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body.get("abort_all") or body["rid"] in self.known:
            self.decoder.abort(body["rid"], bool(body.get("abort_all")))
        return web.Response()

    async def pause(self, http: web.Request) -> web.Response:
        mode = (await http.json()).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _wrong(f"mode {mode}")
        self.open.clear()
        self.decoder.paused = True
        if mode == "retract":
            self.decoder.retract()
        return web.json_response({"status": "ok"})

    async def resume(self, http: web.Request) -> web.Response:
        self.decoder.paused = False
        self.decoder.go.set()
        self.open.set()
        return web.json_response({"status": "ok"})

    async def update(self, http: web.Request) -> web.Response:
        body = await http.json()
        while not self.decoder.paused and (self.decoder.running or self.decoder.waiting):
            await asyncio.sleep(0.001)
        try:
            self.decoder.swap(body["model_path"], body.get("weight_version"))
        except Exception as error:
            return _updated(False, f"Failed to get weights iterator: {error}.")
        self.model_path = body["model_path"]
        if body.get("flush_cache", True):
            if self.decoder.running:
                return _updated(False, "Weights were updated, but the cache was not flushed because requests run")
            self.decoder.prefixes.clear()
        return _updated(True, "Succeeded to update model weights.")

    async def load_adapter(self, http: web.Request) -> web.Response:
        body = await http.json()
        try:
            if not self.options.enable_lora:
                raise ValueError("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
            self._add_adapter(body["lora_name"], Path(body["lora_path"]))
        except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
            return _changed(str(error))
        return _changed("")

    def _add_adapter(self, name: str, folder: Path) -> None:
        self.decoder.add_adapter(name, folder, self.options.max_lora_rank, self.options.lora_target_modules)
        self.adapter_loads += 1
        self.adapter_ids[name] = self.adapter_loads
        self.adapter_folders[name] = folder

    async def unload_adapter(self, http: web.Request) -> web.Response:
        name = (await http.json())["lora_name"]
        if name not in self.decoder.adapters:
            return _changed(f"LoRA with name {name} does not exist.")
        while any(request.adapter == name for request in self.known.values()):
            await asyncio.sleep(0.001)
        del self.decoder.adapters[name], self.adapter_ids[name]
        return _changed("")

    async def models(self, http: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in (self.model_path, *self.decoder.adapters)]})

    async def model_info(self, http: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model_path, "weight_version": self.decoder.weight_version})

    async def server_info(self, http: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": "stand-in",
                "context_length": self.options.context_length,
                "max_running_requests": self.options.max_running_requests,
                "max_total_num_tokens": self.options.max_total_tokens,
                "disable_overlap_schedule": True,
                "enable_lora": self.options.enable_lora,
                "max_lora_rank": self.options.max_lora_rank,
                "max_loaded_loras": self.options.max_loaded_loras,
                "lora_target_modules": self.options.lora_target_modules,
                "lora_strict_loading": self.options.lora_strict_loading,
            }
        )

    async def ready(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.open.is_set() else 503)


def _wrong(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)


def _changed(message: str) -> web.Response:
    body = {"success": not message, "error_message": message}
    return web.json_response(body, status=400 if message else 200)


def _updated(success: bool, message: str) -> web.Response:
    return web.json_response({"success": success, "message": message}, status=200 if success else 400)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int, default=264)
    parser.add_argument("--max-running-requests", type=int, default=32)
    parser.add_argument("--max-total-tokens", type=int, default=16384)
    parser.add_argument("--admin-api-key")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--lora-strict-loading", action="store_true")
    parser.add_argument("--max-lora-rank", type=int)
    parser.add_argument("--max-loaded-loras", type=int)
    parser.add_argument("--lora-target-modules", nargs="*")
    options, _ = parser.parse_known_args()
    if options.config is not None:
        options.admin_api_key = yaml.safe_load(options.config.read_text())["admin-api-key"]
    torch.set_num_threads(1)
    disable_progress_bar()

    async def application() -> web.Application:
        return Server(options).app()

    web.run_app(application(), host=options.host, port=options.port, print=None)


if __name__ == "__main__":
    main()
