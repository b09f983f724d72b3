#!lua flags=allow-oom
-- Gives the leadership lease to a candidate. ARGV: new token, candidate name. Returns 1 when the token leads.
local meta = call('HMGET', K.meta, 'leader', 'leader_until')
if meta[1] and meta[1] ~= ARGV[1] and now() < recorded_time('leader_until', meta[2], now() + ttl_ms()) then return 0 end
if meta[1] ~= ARGV[1] then
  call('HSET', K.meta, 'leader_since', now())
  -- The straggler time-out does not run without a leader, who alone sees whether the set of groups has changed.
  call('HDEL', K.meta, 'blocked_since')
  -- A new leader after a failure means that an operator has restarted the run: reset the counters of consecutive groups.
  if (call('HGET', K.meta, 'failure') or '') ~= '' then
    call('HSET', K.meta, 'failure', '', 'filtered_in_a_row', 0, 'unscored_in_a_row', 0)
  end
end
call('HSET', K.meta, 'leader', ARGV[1], 'leader_name', ARGV[2], 'leader_until', now() + ttl_ms())
return 1
