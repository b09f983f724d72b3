#!lua flags=allow-oom
-- uses: roles
-- A cut whose batch file was never confirmed is taken back, for a rollback: its groups are ready again.
-- ARGV: trainer. Returns how many groups went back.
require_trainer(ARGV[1])
local meta = call('HMGET', K.meta, 'trained_step', 'cut_step')
local step = meta[2]
if step == meta[1] or call('HGET', batch_key(step), 'digest') then return 0 end
local gids = call('LRANGE', batch_groups_key(step), 0, -1)
for _, gid in ipairs(gids) do
  local v = call('HMGET', group_key(gid), 'index', 'step')
  call('HDEL', K.cut, gid)
  call('ZADD', K.ready, v[1], gid)
  call('ZADD', K.ready_steps, v[2] or '+inf', gid)
end
call('UNLINK', batch_groups_key(step))
call('HSET', K.meta, 'cut_step', meta[1])
call('UNLINK', K.cuts)
return #gids
