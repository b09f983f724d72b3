local function make_ready(group)
  local gid = group.id
  call('ZREM', K.open, gid)
  call('ZREM', K.open_steps, gid)
  call('ZADD', K.ready, group.index, gid)
  call('ZADD', K.ready_steps, group.step or '+inf', gid)
  call('ZADD', K.ready_tokens, group.tokens, gid)
  call('HSET', K.meta, 'filtered_in_a_row', 0, 'unscored_in_a_row', 0)
  note_ready_time()
  count('groups_ready_total', 1)
end

-- Adds the reward of a scored member to those of its group; counts the member as solved if is_solved.
local function add_reward(group, id, reward, tokens, is_solved)
  local value = tonumber(reward)
  add_member_facts(group, id, value, tokens, is_solved)
  if not group.low or value < tonumber(group.low) then group.low = reward end
  if not group.high or value > tonumber(group.high) then group.high = reward end
end

local TERMINAL = {[S.scored] = true, [S.unscorable] = true, [S.dead] = true, [S.surplus] = true}

-- Cuts off the members that a group with spare members no longer needs. Their tokens are deleted and counted as waste;
-- the sessions that hold them learn it at the next write. Reads the state of every member.
local function cut_off_surplus(group)
  local last
  for member = 0, group.launched - 1 do
    local id, keys = group.id .. '.' .. member, {}
    if not TERMINAL[call('HGET', trajectory_key(id), 'state') or S.pending] then
      local tokens = take_out_member(id, keys)
      unlink(keys)
      call('HSET', trajectory_key(id), 'state', S.surplus, 'tokens', tokens)
      waste(id, R.surplus, tokens)
      call('HINCRBY', K.drops, R.surplus .. ':' .. length_decile(tokens), 1)
      count('surplus', 1)
      count('surplus_total', 1)
      call('HDEL', group_key(group.id), step_field(id))
      group.terminal = group.terminal + 1
      last = id
    end
  end
  if last then recompute_step(group, last) end
end

-- Ends a group that gets no further member: it is ready, or dropped.
local function end_group(group, is_unscored)
  note_outcome(group)
  note_time(group)
  if is_unscored then
    call('HINCRBY', K.meta, 'unscored_in_a_row', 1)
    drop_group(group, R.too_few_scored)
  elseif tonumber(group.low) == tonumber(group.high) and call('HGET', K.limits, 'filter_zero_variance') == '1' then
    call('HINCRBY', K.meta, 'filtered_in_a_row', 1)
    call('HSET', K.meta, 'unscored_in_a_row', 0)
    drop_group(group, tonumber(group.low) > 0 and R.filtered_all_right or R.filtered_all_wrong)
  else
    make_ready(group)
  end
end

-- Ends the round of an open group once every launched member is terminal, or once the needed ones are scored if it has
-- spare ones. A group with rounds then waits for the leader; any other one ends.
local function settle(group)
  if group.spare and group.scored >= group.needed then cut_off_surplus(group) end
  if group.terminal < group.launched then return end
  -- Advantages within a group need two scores; a group of one is compared with its batch.
  local is_unscored = group.scored < math.min(2, group.needed)
  if group.round and not is_unscored then
    call('ZADD', K.undecided, group.index, group.id)
  else
    end_group(group, is_unscored)
  end
end

-- A member without a score is replaced while the group has less than its most members. A fork is not: its agent began
-- with another member, whose replacement begins anew.
local function member_without_score(group, id)
  touch(group)
  group.terminal = group.terminal + 1
  recompute_step(group, id)
  if group.launched < most_members(group.needed) and call('HEXISTS', trajectory_key(id), 'is_fork') == 0 then
    local member = group.launched
    local replacement = group.id .. '.' .. member
    group.launched = member + 1
    call('ZADD', K.pending, start_place(group.index, group.rank, member), replacement)
    -- Before the group began again, another member may have had this id.
    if group.incarnation then
      call('HSET', trajectory_key(replacement), 'state', S.pending, 'incarnation', group.incarnation)
    end
    count('replacements_total', 1)
  end
end
