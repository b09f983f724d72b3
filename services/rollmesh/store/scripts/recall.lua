#!lua
-- Opens the oldest groups that were set aside, for one batch. ARGV: leader, train step of the batch, groups to recall for
-- it in all calls, groups of this call. Returns the groups recalled for the batch so far, and those of this call.
require_leader(ARGV[1])
refuse_while_recovering('recall')
local step = tonumber(ARGV[2])
local meta = call('HMGET', K.meta, 'cut_step', 'recalled_for', 'recalled', 'abandoned_to')
if meta[4] then fail('CONFLICT', 'recall for ' .. step .. ': a rollback is still dropping the branch that it abandons') end
if step ~= tonumber(meta[1]) + 1 then fail('CONFLICT', 'recall for ' .. step .. ': cut_step is ' .. meta[1]) end
local before = tonumber(meta[2]) == step and tonumber(meta[3]) or 0
local most, opened = math.min(tonumber(ARGV[3]) - before, tonumber(ARGV[4])), 0
for _, gid in ipairs(most > 0 and call('ZRANGE', K.aside, 0, most - 1) or {}) do
  local v = call('HMGET', group_key(gid), 'index', 'launched', 'lost', 'rank')
  -- A large group has no record while its members are reset.
  if v[1] then
    local lost = {}
    for member in string.gmatch(v[3], '%d+') do lost[#lost + 1] = member end
    call('ZREM', K.aside, gid)
    call('ZADD', K.open, v[1], gid)
    queue_members(gid, tonumber(v[1]), tonumber(v[2]), lost, v[4])
    opened = opened + 1
  end
end
call('HSET', K.meta, 'recalled_for', step, 'recalled', before + opened)
count('groups_recalled_total', opened)
flush_counts()
return {before + opened, opened}
