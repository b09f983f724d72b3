"""The generator process: an engine, its gRPC server, the policy watcher, the registration and the admin port."""

import asyncio
from contextlib import aclosing

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.config import RunConfig
from rollmesh.generator.canary import Canary
from rollmesh.generator.engines import build_engine
from rollmesh.generator.engines.engine_protocol import Engine, OnNewVersion
from rollmesh.generator.generation_service import GenerationService, empty_chunk_interval
from rollmesh.generator.generator_metrics import EngineCollector, GeneratorMetrics
from rollmesh.generator.policy_loader import PolicyLoader
from rollmesh.generator.policy_watcher import PolicyWatcher, ReloadTurns
from rollmesh.generator.serving_state import Registration, ServingState
from rollmesh.runtime.addresses import advertised, bind_host, host_port
from rollmesh.runtime.grpc import HealthReporter, create_server
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.service_host import service_host
from rollmesh.runtime.tasks import cancel_and_wait, raise_first_error
from rollmesh.scheduling.next_policy import ReloadRules
from rollmesh.store.trajectory_store import open_service_store
from rollmesh.v1 import generation_service_pb2_grpc as stubs

SERVICE_NAME = "rollmesh.v1.GenerationService"


async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
    """Serve the run's policies until ``shutdown``, then deregister, end streams as interrupted and stop the engine.

    Raises ConfigError for options that cannot work on this machine, StoreUnavailable if Redis is unreachable at
    startup, EngineError if the engine cannot load its first policy or fails later.
    """
    async with aclosing(build_engine(config, index)) as engine, service_host(config, "generator", index) as host:
        host.publish(starting=True)
        store = await open_service_store(host, shutdown)
        # Not earlier: a port that listens without an answer lets callers wait that a closed port would send elsewhere.
        server = create_server(host.security)
        grpc_port = host.security.bind(server, host_port(bind_host(config), config.network.grpc_port))
        serving_state = ServingState(address=advertised(config, grpc_port))
        host.metrics.registry.register(EngineCollector(engine.status, lambda: not serving_state.reason))
        service_metrics = GeneratorMetrics(host.metrics)
        rules = ReloadRules.from_config(config)
        loader = PolicyLoader(
            engine,
            open_checkpoints(config, host.health.waits),
            serving_state,
            service_metrics,
            mode=OnNewVersion(config.generator.on_new_version),
            canary=Canary.from_config(config),
            max_context_tokens=config.generator.max_context_tokens,
        )
        turns = ReloadTurns(
            store.reloads,
            serving_state.instance_id,
            service_metrics,
            at_once=rules.at_once,
            ttl=config.store.session_ttl_seconds,
        )
        watcher = PolicyWatcher(
            loader, store.policies, serving_state, service_metrics, host.health, rules=rules, turns=turns
        )
        interval = empty_chunk_interval(config.rollout.chunk_timeout_seconds)
        service = GenerationService(engine, serving_state, service_metrics, watcher.load_version, interval)
        stubs.add_GenerationServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        reporter = HealthReporter(server, SERVICE_NAME)
        await server.start()
        # Handlers still in progress at shutdown must close their streams: the run file limits the time for that.
        host.stack.push_async_callback(server.stop, config.generator.drain_timeout_seconds)
        host.publish(grpc=serving_state.address)
        registration = Registration(
            store.generators, engine, serving_state, service_metrics, host.health, reporter, config.store
        )
        await _run(shutdown, engine, serving_state, watcher, registration)


async def _run(
    shutdown: Shutdown, engine: Engine, serving_state: ServingState, watcher: PolicyWatcher, registration: Registration
) -> None:
    """Run the loops until shutdown, a drain or a failed loop; then deregister and deliver every sampled token.

    A drained process never accepts calls again, so it exits. Its supervisor starts a new one unless it scales down.
    """
    log = get_logger("generator")
    waiting = asyncio.create_task(shutdown.wait(), name="shutdown")
    drained = asyncio.create_task(serving_state.drained.wait(), name="drained")
    loops = [
        asyncio.create_task(watcher.run(), name="policies"),
        asyncio.create_task(registration.run(), name="heartbeat"),
    ]
    try:
        await asyncio.wait([waiting, drained, *loops], return_when=asyncio.FIRST_COMPLETED)
    finally:
        serving_state.drain()
        ended = await cancel_and_wait(waiting, drained, *loops)
        await registration.leave()
        interrupted = await serving_state.interrupt_all(engine) if serving_state.started else 0
        log.info("left_the_mesh", interrupted_calls=interrupted)
    raise_first_error(ended)
