#!lua flags=allow-oom
-- uses: core fence roles
-- Declares expired sessions dead, but not within one TTL of a new leader or of a recovery. ARGV: leader.
-- Returns the sessions whose trajectories must be released (close_session), steps to sweep, and dropped groups.
require_leader(ARGV[1])
if recovering() then return {{}, {}, {}} end
local meta, ttl = call('HMGET', K.meta, 'leader_since', 'quiet_until'), ttl_ms()
local led_since = recorded_time('leader_since', meta[1], now())
local quiet_until = recorded_time('quiet_until', meta[2], now() + ttl)
-- Correct sessions that were renewed before the clock of the host was set back (lib/fence.lua).
for _, session in ipairs(call('ZRANGE', K.sessions, '(' .. now() + ttl, '+inf', 'BYSCORE', 'LIMIT', 0, 64)) do
  call('ZADD', K.sessions, 'XX', now() + ttl, session)
end
if now() >= led_since + ttl and now() >= quiet_until then
  for _, session in ipairs(call('ZRANGE', K.sessions, '-inf', '(' .. now(), 'BYSCORE', 'LIMIT', 0, 64)) do
    call('ZREM', K.sessions, session)
    call('SADD', K.closing, session)
    call('HINCRBY', K.counts, 'reaped_sessions_total', 1)
  end
end
return {call('SMEMBERS', K.closing), call('SMEMBERS', K.unswept), call('HKEYS', K.dropped)}
