-- Rounds of a group. The group's record has its current `round`; of every round a field `plan:<round>`: the number of its
-- first member and the plan, JSON; of the first round `first`: members needed and launched; and `closed` after the last
-- round. A group without these fields has one round.
local function begin_rounds(gid, needed, launched, plan)
  call('HSET', group_key(gid), 'round', 0, 'first', needed .. ' ' .. launched, 'plan:0', '0 ' .. plan)
end

-- Returns (first member, plan) of a round; nil for one that the group does not have.
local function round_of(gid, round)
  local first, plan = string.match(call('HGET', group_key(gid), 'plan:' .. round) or '', '^(%d+) (.*)$')
  return tonumber(first), plan
end

-- Plan of the round that launched a trajectory.
local function plan_of(id)
  local gid, member = string.match(id, '^(.*)%.(%d+)$')
  for round = tonumber(call('HGET', group_key(gid), 'round') or '0'), 0, -1 do
    local first, plan = round_of(gid, round)
    if first and first <= tonumber(member) then return plan end
  end
end

-- A group that waits for the decision at the end of this round; nil after a decision, and for a group that has left.
local function undecided_group(gid, round)
  if not call('ZSCORE', K.undecided, gid) then return nil end
  local group = load_group(gid)
  return group and group.round == tonumber(round) and group or nil
end
