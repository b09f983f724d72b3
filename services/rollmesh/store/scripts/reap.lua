#!lua flags=allow-oom
-- Declares expired sessions dead. Never within one TTL of a new leader or of a recovery. ARGV: leader.
-- Returns the sessions whose trajectories are to be given back (close_session), and steps to be swept.
require_leader(ARGV[1])
if recovering() then return {{}, {}} end
local meta = call('HMGET', K.meta, 'leader_since', 'quiet_until')
if now() >= tonumber(meta[1]) + ttl_ms() and now() >= tonumber(meta[2] or '0') then
  for _, session in ipairs(call('ZRANGE', K.sessions, '-inf', '(' .. now(), 'BYSCORE', 'LIMIT', 0, 64)) do
    call('ZREM', K.sessions, session)
    call('SADD', K.closing, session)
    call('HINCRBY', K.counts, 'reaped_sessions_total', 1)
  end
end
return {call('SMEMBERS', K.closing), call('SMEMBERS', K.unswept)}
