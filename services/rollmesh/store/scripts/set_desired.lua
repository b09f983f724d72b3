#!lua flags=allow-oom
-- ARGV: leader, pool size, paused (1|0), interrupt below version, reason, blocked (1|0|''), start at version.
require_leader(ARGV[1])
call('HSET', K.desired, 'pool_size', ARGV[2], 'paused', ARGV[3], 'interrupt_below_version', ARGV[4], 'reason', ARGV[5],
  'start_at_version', ARGV[7])
if ARGV[6] == '1' then call('HSETNX', K.meta, 'blocked_since', now())
elseif ARGV[6] == '0' then call('HDEL', K.meta, 'blocked_since') end
return 1
