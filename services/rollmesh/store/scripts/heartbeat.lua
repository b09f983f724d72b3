#!lua flags=allow-oom
-- ARGV: session. Returns the run_id of the server: a new one asks the worker to re-register.
recovering()
require_session(ARGV[1])
call('ZADD', K.sessions, now() + ttl_ms(), ARGV[1])
return call('HGET', K.meta, 'run_id')
