-- Counts the tokens of a member without a score as wasted. A later drop of its group does not count them again.
local function waste(id, reason, tokens)
  call('HSET', trajectory_key(id), 'wasted', 1)
  call('HINCRBY', K.drops, 'tokens:' .. reason, tokens)
end

-- Removes one member from every index and counter; adds its keys to `keys` and returns its saved tokens, and the number
-- of them that were counted as wasted before.
local function take_out_member(id, keys)
  local v = call('HMGET', trajectory_key(id), 'state', 'session', 'tokens', 'links', 'wasted', 'kept')
  local state = v[1] or S.pending
  if state == S.pending then call('ZREM', K.pending, id)
  elseif state == S.partial then call('ZREM', K.partial, id)
  elseif state == S.resting then call('ZREM', K.resting, id)
  else count(state, -1) end
  if v[2] and (state == S.leased or state == S.finished) then call('SREM', held_key(v[2]), id) end
  if state == S.finished and not v[2] then call('ZREM', K.scoring, id) end
  if v[1] then
    payload_keys(id, v[4], keys)
    keys[#keys + 1] = trajectory_key(id)
  end
  local tokens = tonumber(v[3] or '0')
  return tokens, v[5] and tokens or v[6] and tokens - tonumber(v[6]) or 0
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

local function note_drop(gid, reason, total, longest, wasted)
  call('HINCRBY', K.drops, 'tokens:' .. reason, total - wasted)
  local decile = length_decile(longest)
  call('HINCRBY', K.drops, 'decile:' .. reason .. ':' .. decile, 1)
  call('XADD', K.ledger, 'MAXLEN', '~', 100000, '*', 'group', gid, 'reason', reason, 'tokens', total, 'decile', decile)
end

local function take_out_of_queues(group, reason)
  for _, queue in ipairs({K.open, K.ready, K.open_steps, K.ready_steps, K.ready_tokens, K.aside, K.undecided}) do
    call('ZREM', queue, group.id)
  end
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
  local ids = {}
  for member = 0, group.launched - 1 do ids[member + 1] = gid .. '.' .. member end
  in_slices(ids, function(...)
    for _, queue in ipairs({K.pending, K.partial, K.resting, K.scoring}) do call('ZREM', queue, ...) end
  end)
  call('HSET', K.dropped, gid, '0 0 0 0 ' .. group.launched .. ' ' .. reason)
  call('UNLINK', group_key(gid))
end

-- Removes a group from the queue for a reason: members, payload, indexes; leaves a tombstone and a ledger entry.
local function drop_group(group, reason)
  take_out_of_queues(group, reason)
  delete_group(group, reason)
end

-- Drops a large group whose members are being reset (lib/begin_again.lua); returns false for another group.
local function drop_returning(gid, reason)
  local entry = call('HGET', K.returning, gid)
  if not entry then return false end
  if reason ~= '' then take_out_of_queues({id = gid}, reason) end
  call('HDEL', K.returning, gid)
  call('HSET', K.dropped, gid, '0 0 0 0 ' .. cjson.decode(entry).members .. ' ' .. reason)
  return true
end

-- Maximum number of trajectories that one lease may turn into dead letters; each may drop its group.
local function most_burials()
  local members = math.min(MOST_MEMBERS_AT_ONCE, most_members(tonumber(call('HGET', K.limits, 'group_size'))))
  return math.max(1, math.min(4, math.floor(400 / (2 * members + 15))))
end
