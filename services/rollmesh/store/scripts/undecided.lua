#!lua flags=no-writes,allow-oom
-- Reads the oldest groups that wait for the leader's decision; changes nothing. ARGV: maximum number of members; the
-- first group has no such limit.
-- Returns the newest trained step and per group: id, round, launched members, prompt id, domain, first member of each
-- round, and per scored member: number, tokens, finish reason, outcome, reward.
local rows, left = {}, tonumber(ARGV[1])

local function scored_members(group)
  local members = {}
  for member = 0, group.launched - 1 do
    local v = call('HMGET', trajectory_key(group.id .. '.' .. member), 'state', 'tokens', 'finish', 'outcome', 'reward')
    if v[1] == S.scored then members[#members + 1] = {member, v[2], v[3], v[4], v[5]} end
  end
  return members
end

for _, gid in ipairs(call('ZRANGE', K.undecided, 0, 63)) do
  local group = load_group(gid)
  left = left - group.launched
  if left < 0 and #rows > 0 then break end
  local firsts = {}
  for round = 0, group.round do firsts[round + 1] = round_of(gid, round) end
  local prompt, domain = group.prompt or '', group.domain or ''
  rows[#rows + 1] = {gid, group.round, group.launched, prompt, domain, firsts, scored_members(group)}
end
return {call('HGET', K.meta, 'trained_step'), rows}
