#!lua flags=allow-oom
-- Consumes a batch: cut(s) -> consumed(s). ARGV: trainer, train step, number of steps for which tombstones are kept.
require_trainer(ARGV[1])
local step = tonumber(ARGV[2])
local trained = tonumber(call('HGET', K.meta, 'trained_step'))
if step <= trained then return 0 end
if step ~= trained + 1 then fail('CONFLICT', 'trained ' .. step .. ': trained_step is ' .. trained) end
if not call('HGET', batch_key(step), 'digest') then
  fail('CONFLICT', 'trained ' .. step .. ': its batch file has not been confirmed')
end
local gids = call('LRANGE', batch_groups_key(step), 0, -1)
local graves = {}
for _, gid in ipairs(gids) do
  graves[#graves + 1] = step
  graves[#graves + 1] = gid
end
call('HDEL', K.cut, unpack(gids))
call('ZADD', K.tombstones, unpack(graves))
call('HSET', K.meta, 'trained_step', step)
note_trained()
-- The leader finishes an interrupted sweep (reap) and then deletes these keys.
if call('SISMEMBER', K.unswept, step) == 0 then call('UNLINK', batch_key(step), batch_groups_key(step)) end
count('consumed_total', #gids)
forget_tombstones(step - tonumber(ARGV[3]), 256 + #gids)
flush_counts()
return #gids
