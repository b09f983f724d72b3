#!lua flags=allow-oom
-- cut(s) -> consumed(s). ARGV: trainer, train step, steps for which tombstones are kept.
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
-- A sweep that died half-way is finished by the leader (reap), which then deletes these.
if call('SISMEMBER', K.unswept, step) == 0 then call('UNLINK', batch_key(step), batch_groups_key(step)) end
count('consumed_total', #gids)

-- Old tombstones become a floor: every prompt position up to it is known. Below the cursor every position is present
-- or gone, so nothing that was never admitted can fall under a floor below it; a tombstone past the cursor (Redis came
-- back from before its admission) stays until the cursor has passed it.
local first_kept = step - tonumber(ARGV[3])
local old = call('ZRANGEBYSCORE', K.tombstones, '-inf', '(' .. first_kept, 'LIMIT', 0, 256 + #gids)
if #old > 0 then
  local meta = call('HMGET', K.meta, 'floor_epoch', 'floor_index', 'cursor_epoch', 'cursor_index')
  local epoch, index = tonumber(meta[1] or '-1'), tonumber(meta[2] or '-1')
  local cursor_epoch, cursor_index = tonumber(meta[3]), tonumber(meta[4])
  for _, gid in ipairs(old) do
    local e, i = string.match(gid, '^e(%d+)%-(%d+)$')
    e, i = tonumber(e), tonumber(i)
    if e and (e > cursor_epoch or (e == cursor_epoch and i >= cursor_index)) then
      call('ZADD', K.tombstones, first_kept, gid)
    else
      if e and (e > epoch or (e == epoch and i > index)) then epoch, index = e, i end
      call('ZREM', K.tombstones, gid)
    end
  end
  call('HSET', K.meta, 'floor_epoch', epoch, 'floor_index', index)
end
flush_counts()
return #gids
