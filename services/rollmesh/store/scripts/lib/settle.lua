-- uses: core counters drop group steps
local function make_ready(group)
  local gid = group.id
  call('ZREM', K.open, gid)
  call('ZREM', K.open_steps, gid)
  call('ZADD', K.ready, group.index, gid)
  call('ZADD', K.ready_steps, group.step or '+inf', gid)
  call('HSET', K.meta, 'filtered_in_a_row', 0, 'unscored_in_a_row', 0)
  count('groups_ready_total', 1)
end

-- Closes an open group once every launched member is terminal.
local function settle(group)
  if group.terminal < group.launched then return end
  if group.scored < 2 then
    call('HINCRBY', K.meta, 'unscored_in_a_row', 1)
    drop_group(group, 'too_few_scored')
  elseif tonumber(group.low) == tonumber(group.high) and call('HGET', K.limits, 'filter_zero_variance') == '1' then
    call('HINCRBY', K.meta, 'filtered_in_a_row', 1)
    call('HSET', K.meta, 'unscored_in_a_row', 0)
    drop_group(group, tonumber(group.low) > 0 and 'filtered_all_right' or 'filtered_all_wrong')
  else
    make_ready(group)
  end
end

-- A member without a score is replaced while replacements are left: at most `needed` per group.
local function member_without_score(group, id)
  touch(group)
  group.terminal = group.terminal + 1
  recompute_step(group, id)
  if group.launched < 2 * group.needed then
    local member = group.launched
    group.launched = member + 1
    call('ZADD', K.pending, order_of(group.index, member), group.id .. '.' .. member)
    count('replacements_total', 1)
  end
end
