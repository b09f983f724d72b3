#!lua flags=allow-oom
-- Renews a session. ARGV: session, number of its trajectories that wait between two calls of a generator. Returns the
-- run_id of the server; after a change the worker re-registers.
recovering()
require_session(ARGV[1])
call('ZADD', K.sessions, now() + ttl_ms(), ARGV[1])
set_waiting(ARGV[1], tonumber(ARGV[2]))
return call('HGET', K.meta, 'run_id')
