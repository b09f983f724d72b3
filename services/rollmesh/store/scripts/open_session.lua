#!lua flags=allow-oom
-- Opens a worker session. ARGV: new token, worker name, address of a process that has sessions of agents.
recovering()
call('ZADD', K.sessions, now() + ttl_ms(), ARGV[1])
call('HSET', session_key(ARGV[1]), 'worker', ARGV[2], 'address', ARGV[3] or '')
return 1
