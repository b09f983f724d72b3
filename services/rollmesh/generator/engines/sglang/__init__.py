"""The SGLang engine: a generator engine over the HTTP API of an SGLang server; never imports SGLang.

sglang_declaration  entry of the engine registry; checks of a machine before a start
sglang_engine       asyncio interface: implements ``generator.engines.engine_protocol.Engine``
sglang_options      options of one server: its command line, environment and settings
engine_state        state shared by the modules below
server_calls        queueing, requests and end of calls
slot_queue          running and waiting calls
slices              request and response of one slice of a call (pure)
reload_plan         steps that change the weights under running requests (pure)
folders             contents of a policy folder, compared before the server loads it
loaded_adapters     adapters in the server, by the slices that name them
lora_options        flags with which a server serves adapters (pure)
server              the SGLang server: start or connect, probe, pause, load
running_clock       clock that stops while the server is paused
api                 HTTP endpoints of the server
server_process      the server as a child process
orphan_guard        parent of the server process: kills it if the generator dies
"""
