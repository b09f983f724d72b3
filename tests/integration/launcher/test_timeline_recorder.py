"""The timeline has the generators' counters, which ``rollmesh sim --calibrate`` reads."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from rollmesh.launcher.redis import running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.timeline_recorder import TimelineRecorder
from rollmesh.runtime.endpoints import AdminClient, Endpoint, published_endpoint
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.scheduling import run_limits

from .test_launcher_outages import config

COUNTERS = """# TYPE rollmesh_generator_decode_steps_total counter
rollmesh_generator_decode_steps_total 40
# TYPE rollmesh_generator_busy_seconds_total counter
rollmesh_generator_busy_seconds_total 1.5
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 0.75
"""


class _Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(COUNTERS.encode())

    def log_message(self, *_: object) -> None:
        pass


async def test_every_line_has_the_work_of_the_generators_that_answer(tmp_path: Path) -> None:
    run, folder = config(tmp_path), RunFolder(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metrics)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    try:
        async with AdminClient(PortSecurity.from_config(run.security)) as client, running_store(run, folder) as running:
            await running.store.limits.init_run(run_limits(run))
            recorder = TimelineRecorder(running.store, folder, client)
            await recorder.sample()
            with (
                published_endpoint(tmp_path, Endpoint(service="generator", index=0, grpc="", admin=address)),
                published_endpoint(tmp_path, Endpoint(service="generator", index=1, grpc="", admin=address)),
            ):
                await recorder.sample()
    finally:
        server.shutdown()
        server.server_close()
    lines = [json.loads(line)["work"] for line in folder.timeline.read_text().splitlines()]
    assert lines == [{}, {"decode_steps": 80.0, "busy_seconds": 3.0, "cpu_seconds": 1.5}]
