-- Drops a reported first token that was never saved; its group may be younger without it.
local function forget_first_token(group, id)
  call('HDEL', trajectory_key(id), 'step')
  recompute_step(group, id)
end

-- A rest waits for a policy after the one that sampled the newest tokens, although a newer one may be announced by now.
local function rests_since(version)
  return version and call('HGET', K.versions, version) or call('HGET', K.meta, 'policy_train_step')
end

-- Returns a held trajectory: an unfinished one becomes partial, resting or pending, a finished one joins the scoring
-- queue. When its group is gone it joins no queue, and the next slice deletes its record.
local function give_back(id, free_attempt, rests)
  local group = load_group(group_of(id))
  if not group then return call('HDEL', trajectory_key(id), 'session') end
  local v = call('HMGET', trajectory_key(id), 'state', 'tokens', 'attempts', 'scorings', 'step', 'version')
  local member = tonumber(string.match(id, '%d+$'))
  if v[1] == S.leased then
    local tokens = tonumber(v[2])
    local partial = tokens > 0
    local state = not partial and S.pending or rests and S.resting or S.partial
    call('HSET', trajectory_key(id), 'state', state)
    if free_attempt then call('HSET', trajectory_key(id), 'attempts', math.max(0, tonumber(v[3]) - 1)) end
    call('HDEL', trajectory_key(id), 'session')
    if v[5] and not partial then forget_first_token(group, id) end
    if state == S.resting then
      call('ZADD', K.resting, rests_since(v[6]), id)
    elseif partial then
      call('ZADD', K.partial, resume_place(group, member, tokens), id)
    else
      call('ZADD', K.pending, start_place(group.index, group.rank, member), id)
    end
    count('leased', -1)
  elseif v[1] == S.finished then
    if free_attempt and v[4] then
      call('HSET', trajectory_key(id), 'scorings', math.max(0, tonumber(v[4]) - 1))
    end
    call('HDEL', trajectory_key(id), 'session')
    call('ZADD', K.scoring, order_of(group.index, member), id)
  end
end
