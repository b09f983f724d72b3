#!lua flags=allow-oom
-- Writes the desired state. ARGV: leader, pool size, paused (1|0), interrupt below version, reason, start at version, name
-- of the set of groups that blocks the cut ('' for none), reason that the cut waits, train step before which trajectories
-- no longer rest, state of an automatic pool ('' for none), most trajectories that wait beyond the pool. A set other than
-- the stored one blocks from now on; a stored time ahead of the clock was written before the clock was set back.
require_leader(ARGV[1])
call('HSET', K.desired, 'pool_size', ARGV[2], 'paused', ARGV[3], 'interrupt_below_version', ARGV[4], 'reason', ARGV[5],
  'start_at_version', ARGV[6], 'waiting_for', ARGV[8], 'rest_before_step', ARGV[9], 'cache_pool', ARGV[10],
  'most_waiting', ARGV[11])
if ARGV[7] == '' then
  call('HDEL', K.meta, 'blocked_since')
else
  local since, name = string.match(call('HGET', K.meta, 'blocked_since') or '', '^(%d+) (.*)$')
  if name ~= ARGV[7] or tonumber(since) > now() then
    call('HSET', K.meta, 'blocked_since', integer(now()) .. ' ' .. ARGV[7])
  end
end
return 1
