#!lua flags=allow-oom
-- Ends a lease to load a policy. ARGV: token. Returns 1 when it held one.
return call('ZREM', K.reloads, ARGV[1])
