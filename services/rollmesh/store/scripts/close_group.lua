#!lua flags=allow-oom
-- Closes an undecided group, which is then ready or dropped. ARGV: leader, group, its current round, then per scored
-- member in order: number, reward, kept tokens ('' for all). Without members the rewards stay as they are.
-- Returns 1; 0 if the group is not undecided in that round, which a retry finds.
require_leader(ARGV[1])
refuse_while_recovering('close_group')
local gid = ARGV[2]
local group = undecided_group(gid, ARGV[3])
if not group then return 0 end

-- Every member is checked before the first write.
local members = {}
for at = 4, #ARGV, 3 do
  local id = gid .. '.' .. ARGV[at]
  local v = call('HMGET', trajectory_key(id), 'state', 'reward', 'tokens')
  if v[1] ~= S.scored then fail('CONFLICT', 'trajectory ' .. id .. ' is not scored') end
  members[#members + 1] = {id = id, before = v[2], tokens = tonumber(v[3]), reward = ARGV[at + 1], kept = ARGV[at + 2]}
end
if #members > 0 and #members ~= group.scored then
  fail('CONFLICT', 'group ' .. gid .. ' has ' .. group.scored .. ' scored members, not ' .. #members)
end

local function shorten(id, tokens, kept)
  call('HSET', trajectory_key(id), 'kept', kept)
  call('HINCRBY', K.drops, 'tokens:' .. R.shortened, tokens - kept)
  count('shortened_total', 1)
end

if #members > 0 then forget_rewards(group) end
for _, m in ipairs(members) do
  if m.reward ~= m.before then call('HSET', trajectory_key(m.id), 'reward', m.reward, 'worker_reward', m.before) end
  if m.kept ~= '' and tonumber(m.kept) < m.tokens then shorten(m.id, m.tokens, tonumber(m.kept)) end
  add_reward(group, m.id, m.reward, m.tokens, false)
end
call('ZREM', K.undecided, gid)
call('HSET', group_key(gid), 'closed', 1)
count('groups_closed_total', 1)
touch(group)
end_group(group, false)
flush_groups()
flush_counts()
return 1
