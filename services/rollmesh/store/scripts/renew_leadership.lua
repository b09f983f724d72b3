#!lua flags=allow-oom
-- uses: core fence
-- Renews the leadership lease. ARGV: token. Returns 0 when another replica leads.
if call('HGET', K.meta, 'leader') ~= ARGV[1] then return 0 end
call('HSET', K.meta, 'leader_until', now() + ttl_ms())
return 1
