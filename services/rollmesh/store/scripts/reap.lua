#!lua flags=allow-oom
-- Declares expired sessions dead, but not within one TTL of a new leader or of a recovery. ARGV: leader.
-- Returns the sessions whose trajectories must be released (close_session), steps to sweep, dropped groups,
-- and groups that begin again.
require_leader(ARGV[1])
if recovering() then return {{}, {}, {}, {}} end
local meta, ttl = call('HMGET', K.meta, 'leader_since', 'quiet_until'), ttl_ms()
local led_since = recorded_time('leader_since', meta[1], now())
local quiet_until = recorded_time('quiet_until', meta[2], now() + ttl)
-- Correct expiries that were written before the clock of the host was set back (lib/fence.lua).
local generator_ttl = tonumber(call('HGET', K.meta, 'generator_ttl_ms') or ttl)
for key, latest in pairs({[K.sessions] = now() + ttl, [K.generator_expiry] = now() + generator_ttl}) do
  for _, name in ipairs(call('ZRANGE', key, '(' .. latest, '+inf', 'BYSCORE', 'LIMIT', 0, 64)) do
    call('ZADD', key, 'XX', latest, name)
  end
end
if now() >= led_since + ttl and now() >= quiet_until then
  for _, session in ipairs(call('ZRANGE', K.sessions, '-inf', '(' .. now(), 'BYSCORE', 'LIMIT', 0, 64)) do
    call('ZREM', K.sessions, session)
    call('SADD', K.closing, session)
    call('HINCRBY', K.counts, 'reaped_sessions_total', 1)
  end
end
return {call('SMEMBERS', K.closing), call('SMEMBERS', K.unswept), call('HKEYS', K.dropped), call('HKEYS', K.returning)}
