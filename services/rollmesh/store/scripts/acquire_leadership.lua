#!lua flags=allow-oom
-- uses: fence
-- ARGV: fresh token, candidate name. Returns 1 when the token now leads.
local meta = call('HMGET', K.meta, 'leader', 'leader_until')
if meta[1] and meta[1] ~= ARGV[1] and now() < tonumber(meta[2]) then return 0 end
if meta[1] ~= ARGV[1] then call('HSET', K.meta, 'leader_since', now()) end
call('HSET', K.meta, 'leader', ARGV[1], 'leader_name', ARGV[2], 'leader_until', now() + ttl_ms())
return 1
