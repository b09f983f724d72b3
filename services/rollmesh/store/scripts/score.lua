#!lua flags=allow-oom
-- Records outcomes, finished -> scored | unscorable, and the group's next state. The script allocates little and completes
-- batches, which frees memory, so it must run when memory is short.
-- ARGV: session, number of items, then per item: id, scored (1|0), shaped reward, outcome bytes, solved (1|0), scores of
-- the teacher ('' for none).
local session, reply, done = ARGV[1], {}, {}

local function apply(id, scored, reward, outcome, solved, teacher)
  local v = call('HMGET', trajectory_key(id), 'session', 'state', 'tokens', 'has_snapshot')
  if v[1] ~= session then return LOST, 0 end
  if v[2] == S.scored or v[2] == S.unscorable then
    local there = call('HMGET', trajectory_key(id), 'reward', 'outcome', 'worker_reward', 'teacher')
    local same = (there[3] or there[1]) == reward and there[2] == outcome and (there[4] or '') == teacher
    return same and DUPLICATE or REFUSED, tonumber(v[3])
  end
  if v[2] ~= S.finished then return REFUSED, tonumber(v[3]) end
  local group = load_group(group_of(id))
  if not group then return LOST, 0 end
  local state = scored and S.scored or S.unscorable
  call('HSET', trajectory_key(id), 'state', state, 'reward', reward, 'outcome', outcome)
  if teacher ~= '' then
    call('HSET', trajectory_key(id), 'teacher', teacher, 'teacher_bytes', #teacher)
    count('saved_bytes_total', #teacher)
  end
  if v[4] then
    -- The memory estimate expects the mean size of finished trajectories for an unfinished one, snapshot included.
    count('saved_bytes_total', call('HSTRLEN', trajectory_key(id), 'snapshot'))
    call('HDEL', trajectory_key(id), 'snapshot', 'has_snapshot')
  end
  done[#done + 1] = id
  count('finished', -1)
  count(state, 1)
  count(state .. '_total', 1)
  if scored then
    touch(group)
    group.terminal, group.scored = group.terminal + 1, group.scored + 1
    group.tokens = group.tokens + tonumber(v[3])
    add_reward(group, id, reward, tonumber(v[3]), solved)
  else
    waste(id, state, v[3])
    member_without_score(group, id)
  end
  settle(group)
  return SAVED, tonumber(v[3])
end

for item = 0, tonumber(ARGV[2]) - 1 do
  local at = 3 + item * 6
  local id, scored, reward, outcome, solved, teacher = unpack(ARGV, at, at + 5)
  local status, tokens = apply(id, scored == '1', reward, outcome, solved == '1', teacher)
  reply[#reply + 1] = status
  reply[#reply + 1] = tokens
end
if #done > 0 then call('SREM', held_key(session), unpack(done)) end
flush_groups()
flush_counts()
return reply
