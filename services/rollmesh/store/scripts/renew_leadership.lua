#!lua flags=allow-oom
-- Renews the leadership lease. ARGV: token. Returns 0 when another replica leads.
local meta = call('HMGET', K.meta, 'leader', 'leader_until')
if meta[1] ~= ARGV[1] then return 0 end
-- As for a new leader: there was none since the lease ended, and workers may have missed their heartbeats too.
if now() >= tonumber(meta[2]) then
  call('HSET', K.meta, 'leader_since', now())
  call('HDEL', K.meta, 'blocked_since')
end
call('HSET', K.meta, 'leader_until', now() + ttl_ms())
return 1
