#!lua flags=allow-oom
-- Fixes the members and the order of one batch: ready -> cut(s). ARGV: leader, train step, group ids.
require_leader(ARGV[1])
local step = tonumber(ARGV[2])
local meta = call('HMGET', K.meta, 'trained_step', 'cut_step', 'abandoned_to')
local gids = {unpack(ARGV, 3)}
if tonumber(meta[2]) == step then
  local there = call('LRANGE', batch_groups_key(step), 0, -1)
  if table.concat(there, ' ') == table.concat(gids, ' ') then return #there end
end
refuse_while_recovering('cut')
if meta[3] then fail('CONFLICT', 'cut ' .. step .. ': a rollback is still dropping the branch that it abandons') end
if step ~= tonumber(meta[2]) + 1 or step ~= tonumber(meta[1]) + 1 then
  fail('CONFLICT', 'cut ' .. step .. ': cut_step is ' .. meta[2] .. ', trained_step is ' .. meta[1])
end
-- docs/architecture.md: The staleness bound
local limits = call('HMGET', K.limits, 'max_staleness', 'mask_old_segments')
local oldest, seen = step - 1 - tonumber(limits[1]), {}
for _, gid in ipairs(gids) do
  local lowest = call('ZSCORE', K.ready_steps, gid)
  if not lowest then fail('CONFLICT', 'cut ' .. step .. ': group ' .. gid .. ' is not ready') end
  if seen[gid] then fail('CONFLICT', 'cut ' .. step .. ': group ' .. gid .. ' is listed twice') end
  seen[gid] = true
  if limits[2] ~= '1' and tonumber(lowest) < oldest then
    fail('CONFLICT', 'cut ' .. step .. ': group ' .. gid .. ' has staleness ' .. (step - 1 - tonumber(lowest)) ..
      ', over the bound of ' .. limits[1])
  end
end
local marks = {}
for _, gid in ipairs(gids) do
  marks[#marks + 1] = gid
  marks[#marks + 1] = step
end
call('ZREM', K.ready, unpack(gids))
call('ZREM', K.ready_steps, unpack(gids))
call('ZREM', K.ready_tokens, unpack(gids))
call('HSET', K.cut, unpack(marks))
call('RPUSH', batch_groups_key(step), unpack(gids))
call('HSET', K.meta, 'cut_step', step, 'cut_at', integer(now()))
call('HDEL', K.meta, 'blocked_since')
call('XADD', K.cuts, 'MAXLEN', 16, step .. '-0', 'groups', #gids)
count('cuts_total', 1)
flush_counts()
return #gids
