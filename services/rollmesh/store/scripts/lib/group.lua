-- Groups are read once and written once per script; all scores of a group in one call need one HSET.
local groups, touched = {}, {}

local function group_of(id)
  return string.match(id, '^(.*)%.%d+$')
end

local function order_of(index, member)
  return index * 4096 + member
end

local function load_group(gid)
  local group = groups[gid]
  if group then return not group.gone and group or nil end
  local v = call('HMGET', group_key(gid), 'index', 'needed', 'launched', 'scored', 'terminal', 'low', 'high', 'step',
    'member_steps')
  if not v[1] then return nil end
  group = {
    id = gid, index = tonumber(v[1]), needed = tonumber(v[2]), launched = tonumber(v[3]), scored = tonumber(v[4]),
    terminal = tonumber(v[5]), low = v[6], high = v[7], step = tonumber(v[8]),
    member_steps = v[9],
  }
  groups[gid] = group
  return group
end

local function touch(group)
  if not group.touched then
    group.touched = true
    touched[#touched + 1] = group
  end
end

local function write_group(group)
  local fields = {'launched', group.launched, 'scored', group.scored, 'terminal', group.terminal}
  if group.low then
    fields[7], fields[8], fields[9], fields[10] = 'low', group.low, 'high', group.high
  end
  call('HSET', group_key(group.id), unpack(fields))
end

local function flush_groups()
  for _, group in ipairs(touched) do
    if not group.gone then write_group(group) end
  end
end

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

local IN_LOSS = {leased = true, partial = true, finished = true, scored = true}

-- The record of a group of an older release does not have the steps of its members.
local function lowest_of_members(group)
  local lowest
  for member = 0, group.launched - 1 do
    local v = call('HMGET', trajectory_key(group.id .. '.' .. member), 'state', 'step')
    if v[1] and IN_LOSS[v[1]] and v[2] then lowest = math.min(lowest or math.huge, tonumber(v[2])) end
  end
  return lowest
end

local function lowest_of_group(group)
  if not group.member_steps then return lowest_of_members(group) end
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

-- Lua unpacks at most 8,000 values and fails after earlier writes; a long trajectory has more values.
local SLICE = 4000
local function in_slices(words, hand_on)
  for at = 1, #words, SLICE do hand_on(unpack(words, at, math.min(at + SLICE - 1, #words))) end
end

local function unlink(keys)
  in_slices(keys, function(...) call('UNLINK', ...) end)
end

local function payload_keys(id, links, keys)
  keys[#keys + 1] = segments_key(id)
  for name in string.gmatch(links or '', '%S+') do
    keys[#keys + 1] = chunk_key(id .. ':' .. name)
  end
end

-- Counts the tokens of a member without a score as wasted. A later drop of its group does not count them again.
local function waste(id, reason, tokens)
  call('HSET', trajectory_key(id), 'wasted', 1)
  call('HINCRBY', K.drops, 'tokens:' .. reason, tokens)
end

-- Removes one member from every index and counter; adds its keys to `keys` and returns its saved tokens, and the number
-- of them that were counted as wasted before.
local function take_out_member(id, keys)
  local v = call('HMGET', trajectory_key(id), 'state', 'session', 'tokens', 'links', 'wasted')
  local state = v[1] or 'pending'
  if state == 'pending' then call('ZREM', K.pending, id)
  elseif state == 'partial' then call('ZREM', K.partial, id)
  else count(state, -1) end
  if v[2] and (state == 'leased' or state == 'finished') then call('SREM', held_key(v[2]), id) end
  if state == 'finished' and not v[2] then call('ZREM', K.scoring, id) end
  if v[1] then
    payload_keys(id, v[4], keys)
    keys[#keys + 1] = trajectory_key(id)
  end
  local tokens = tonumber(v[3] or '0')
  return tokens, v[5] and tokens or 0
end

-- Deletes a group's record, prompt and members; returns their saved tokens, those of the longest member, and the number
-- of tokens counted as wasted before.
local function delete_records(gid, launched)
  local total, longest, wasted, keys = 0, 0, 0, {group_key(gid), prompt_key(gid)}
  for member = 0, launched - 1 do
    local tokens, before = take_out_member(gid .. '.' .. member, keys)
    total = total + tokens
    longest = math.max(longest, tokens)
    wasted = wasted + before
  end
  unlink(keys)
  return total, longest, wasted
end

-- Each drop deletes up to four old tombstones, so that their number does not grow between two train steps.
local TOMBSTONE_STEPS = 256

local function bury_group(gid)
  local step = call('HGET', K.meta, 'trained_step') or '0'
  call('ZADD', K.tombstones, step, gid)
  forget_tombstones(tonumber(step) - TOMBSTONE_STEPS, 4)
end

local function length_bucket(tokens)
  return math.floor(math.log(tokens + 1) / math.log(2) * 4)
end

local function length_decile(tokens)
  local histogram, bucket = call('HGETALL', K.lengths), length_bucket(tokens)
  local below, all = 0, 0
  for at = 1, #histogram, 2 do
    local n = tonumber(histogram[at + 1])
    all = all + n
    if tonumber(histogram[at]) < bucket then below = below + n end
  end
  if all == 0 then return 0 end
  return math.min(9, math.floor(10 * below / all))
end

local function note_drop(gid, reason, total, longest, wasted)
  call('HINCRBY', K.drops, 'tokens:' .. reason, total - wasted)
  local decile = length_decile(longest)
  call('HINCRBY', K.drops, 'decile:' .. reason .. ':' .. decile, 1)
  call('XADD', K.ledger, 'MAXLEN', '~', 100000, '*', 'group', gid, 'reason', reason, 'tokens', total, 'decile', decile)
end

local function take_out_of_queues(group, reason)
  for _, queue in ipairs({K.open, K.ready, K.open_steps, K.ready_steps}) do call('ZREM', queue, group.id) end
  bury_group(group.id)
  call('HINCRBY', K.drops, 'groups:' .. reason, 1)
end

-- A large group is deleted in two stages. Its record is deleted now and its members leave every queue, so that none is
-- leased again. The records of the members are deleted in slices (sweep_dropped); the last slice records the drop if
-- there is a reason.
local MOST_MEMBERS_AT_ONCE = 100

local function delete_group(group, reason)
  local gid = group.id
  group.gone = true
  if group.launched <= MOST_MEMBERS_AT_ONCE then
    local total, longest, wasted = delete_records(gid, group.launched)
    if reason ~= '' then note_drop(gid, reason, total, longest, wasted) end
    return
  end
  for _, queue in ipairs({K.pending, K.partial, K.scoring}) do
    call('ZREMRANGEBYSCORE', queue, order_of(group.index, 0), order_of(group.index, 4095))
  end
  call('HSET', K.dropped, gid, '0 0 0 0 ' .. group.launched .. ' ' .. reason)
  call('UNLINK', group_key(gid))
end

-- Removes a group from the queue for a reason: members, payload, indexes; leaves a tombstone and a ledger entry.
local function drop_group(group, reason)
  take_out_of_queues(group, reason)
  delete_group(group, reason)
end

-- Maximum number of trajectories that one lease may turn into dead letters; each may drop its group.
local function most_burials()
  local members = math.min(MOST_MEMBERS_AT_ONCE, 2 * tonumber(call('HGET', K.limits, 'group_size')))
  return math.max(1, math.min(4, math.floor(400 / (2 * members + 15))))
end

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

-- Dead letters keep their payload, so their number and their bytes are bounded: the oldest are deleted first.
local MOST_LETTERS = 1000

-- Bytes of ids and logprobs, list entries and keys, as in the memory estimate of the scheduler, and of the prompt.
local function letter_bytes(id, tokens)
  return 8 * tonumber(tokens) + 90 * call('LLEN', letter_segments_key(id)) + call('STRLEN', letter_prompt_key(id)) + 1500
end

-- A sixteenth of the server's memory.
local function most_letter_bytes()
  local limit = tonumber(string.match(call('INFO', 'memory'), '\nmaxmemory:(%d+)'))
  return limit > 0 and limit / 16 or 268435456
end

local function count_letter_bytes(id, now_bytes)
  local before = tonumber(call('HGET', letter_key(id), 'bytes') or '0')
  return call('HINCRBY', K.meta, 'letter_bytes', now_bytes - before)
end

local function forget_letter(id)
  count_letter_bytes(id, 0)
  for name in string.gmatch(call('HGET', letter_key(id), 'links') or '', '%S+') do
    call('UNLINK', chunk_key(id .. ':' .. name))
  end
  call('UNLINK', letter_key(id), letter_segments_key(id), letter_prompt_key(id))
  return call('ZREM', K.letters, id)
end

-- The newest letter stays, regardless of its size.
local function forget_surplus_letters(newest)
  local letters = call('ZCARD', K.letters)
  local bytes, most_bytes = tonumber(call('HGET', K.meta, 'letter_bytes')), most_letter_bytes()
  for _, id in ipairs(call('ZRANGE', K.letters, 0, 3)) do
    if id == newest or (letters <= MOST_LETTERS and bytes <= most_bytes) then return end
    forget_letter(id)
    letters, bytes = letters - 1, tonumber(call('HGET', K.meta, 'letter_bytes'))
    count('letters_forgotten_total', 1)
  end
end

-- Turns a trajectory into a dead letter with its payload; it counts as a member without a score.
local function bury(id, reason)
  local gid = group_of(id)
  local v = call('HMGET', trajectory_key(id), 'attempts', 'tokens', 'links', 'birth')
  call('HSET', letter_key(id), 'group', gid, 'reason', reason, 'attempts', v[1] or 0, 'tokens', v[2] or 0,
    'links', v[3] or '', 'birth', v[4] or 0, 'time', now())
  if call('EXISTS', segments_key(id)) == 1 then call('RENAME', segments_key(id), letter_segments_key(id)) end
  call('COPY', prompt_key(gid), letter_prompt_key(id), 'REPLACE')
  call('ZADD', K.letters, now(), id)
  local bytes = letter_bytes(id, v[2] or 0)
  count_letter_bytes(id, bytes)
  call('HSET', letter_key(id), 'bytes', bytes)
  forget_surplus_letters(id)
  call('HSET', trajectory_key(id), 'state', 'dead')
  call('HDEL', trajectory_key(id), 'links', 'step', 'session', 'snapshot', 'has_snapshot')
  waste(id, 'dead', v[2] or 0)
  count('dead', 1)
  count('dead_total', 1)
  local group = load_group(gid)
  if group then
    member_without_score(group, id)
    settle(group)
  end
end
