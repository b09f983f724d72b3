"""The SGLang engine: a generator engine over the HTTP API of an SGLang server; never imports SGLang.

sglang_engine       asyncio interface: implements ``generator.engines.engine_protocol.Engine``
sglang_options      options of one server: its command line, environment and settings
engine_state        running and waiting calls, and the state shared by the modules below
server_calls        requests and end of calls
slices              request and response of one slice of a call (pure)
loaded_adapters     adapters in the server, by the slices that name them
server              the SGLang server: start or connect, probe, pause, load
server_api          HTTP endpoints of the server
server_process      the server as a child process
orphan_guard        parent of the server process: kills it if the generator dies
"""
