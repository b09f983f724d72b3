local function step_field(id)
  return 's' .. string.match(id, '%d+$')
end

-- Lowers the smallest train_step whose tokens are in the loss, for an open group. The group's record also stores the step
-- of each member, so that the minimum can be recomputed without a read of every member.
local function lower_step(group, step, id)
  if not group then return end
  call('HSET', group_key(group.id), step_field(id), step)
  if group.step and group.step <= step then return end
  group.step = step
  call('HSET', group_key(group.id), 'step', step)
  call('ZADD', K.open_steps, step, group.id)
end

local function lowest_of_group(group)
  local fields, lowest = call('HGETALL', group_key(group.id)), nil
  for at = 1, #fields, 2 do
    if string.match(fields[at], '^s%d+$') then lowest = math.min(lowest or math.huge, tonumber(fields[at + 1])) end
  end
  return lowest
end

-- Recomputes the step of a group after a member's tokens have left the loss.
local function recompute_step(group, id)
  if not group then return end
  call('HDEL', group_key(group.id), step_field(id))
  local lowest = lowest_of_group(group)
  group.step = lowest
  if lowest then
    call('HSET', group_key(group.id), 'step', lowest)
    call('ZADD', K.open_steps, lowest, group.id)
  else
    call('HDEL', group_key(group.id), 'step')
    call('ZREM', K.open_steps, group.id)
  end
end
