#!lua flags=allow-oom
-- Opens a worker session. ARGV: new token, worker name.
recovering()
call('ZADD', K.sessions, now() + ttl_ms(), ARGV[1])
call('HSET', session_key(ARGV[1]), 'worker', ARGV[2])
return 1
