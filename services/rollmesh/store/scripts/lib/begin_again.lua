-- A group that begins again loses all tokens of its members and keeps its admission index. It opens again with as many
-- members as it was admitted with, or waits aside for a recall with `needed` members. A member without a score (dead,
-- unscorable) stays as it is. A group with rounds begins again with its first one.
--
-- A group of more than MOST_MEMBERS_AT_ONCE members is reset in slices (sweep_returning), from the last member to the
-- first. It is in K.open or K.aside throughout, but its record waits in K.returning, so that no other script finds the
-- group: none of its members is leased, scored or settled before the last slice.

-- `restarted` and `set_aside` count how often the group began again, for operators. `ended` is set if it was ready, or if a
-- batch file has its outcome.
local KEPT_FIELDS = {
  'replay_of', 'prompt', 'rank', 'expected', 'spare', 'first', 'plan:0', R.restarted, R.set_aside, 'domain', 'ended',
}

-- Larger than every incarnation so far, because each of these events makes at most one.
local function next_incarnation()
  local events = call('HMGET', K.counts, 'restarts_total', 'begun_again_total')
  return integer(tonumber(events[1] or '0') + tonumber(events[2] or '0') + 1)
end

local function is_lost(r, member)
  for _, lost in ipairs(r.lost) do
    if lost == member then return true end
  end
  return false
end

-- Resets up to `most` members, the last ones first. Later writes of a worker that held one of them are refused, because
-- the session is gone and the incarnation is another.
local function reset_members(r, most)
  r.incarnation = next_incarnation()
  local keys, fresh, dropped = {}, {}, 0
  for member = r.left - 1, math.max(0, r.left - most), -1 do
    local id = r.id .. '.' .. member
    local state = call('HGET', trajectory_key(id), 'state')
    if state == S.dead or state == S.unscorable then
      r.lost[#r.lost + 1] = member
    else
      local tokens, wasted = take_out_member(id, keys)
      dropped = dropped + tokens - wasted
      r.longest = math.max(r.longest or 0, tokens)
      fresh[#fresh + 1] = id
    end
  end
  r.left = math.max(0, r.left - most)
  unlink(keys)
  for _, id in ipairs(fresh) do
    call('HSET', trajectory_key(id), 'state', S.pending, 'incarnation', r.incarnation)
  end
  call('HINCRBY', K.drops, 'tokens:' .. r.reason, dropped)
  count('begun_again_total', 1)
end

-- The last members go until `fresh` unfinished ones are left, up to one that is lost: forks, spare members of a group
-- that was set aside, and those of later rounds.
local function forget_last_members(r, most)
  local keys = {}
  while r.launched - #r.lost > r.fresh and not is_lost(r, r.launched - 1) and #keys < most do
    r.launched = r.launched - 1
    keys[#keys + 1] = trajectory_key(r.id .. '.' .. r.launched)
  end
  unlink(keys)
  return #keys == most
end

local function queue_members(gid, index, launched, lost, rank)
  local members, gone = {}, {}
  for _, member in ipairs(lost) do gone[tonumber(member)] = true end
  for member = 0, launched - 1 do
    if not gone[member] then
      members[#members + 1] = start_place(index, rank, member)
      members[#members + 1] = gid .. '.' .. member
    end
  end
  if #members > 0 then call('ZADD', K.pending, unpack(members)) end
end

local function write_fresh_group(r)
  call('HSET', group_key(r.id), 'index', r.index, 'needed', r.needed, 'launched', r.launched, 'scored', 0,
    'terminal', #r.lost, 'incarnation', r.incarnation)
  if r.aside then call('HSET', group_key(r.id), 'lost', table.concat(r.lost, ' ')) end
  if r.first then
    call('HSET', group_key(r.id), 'round', 0)
    local spare = r.launched - #r.lost - r.needed
    r.spare = not r.aside and spare > 0 and integer(spare) or nil
  end
  for _, field in ipairs(KEPT_FIELDS) do
    if r[field] then call('HSET', group_key(r.id), field, r[field]) end
  end
  if not r.aside then queue_members(r.id, r.index, r.launched, r.lost, r.rank) end
  call('HINCRBY', K.drops, 'again:' .. r.reason .. ':' .. length_decile(r.longest or 0), 1)
end

-- Continues a reset that is in K.returning; returns 1 while another call is needed.
local function continue_reset(gid, most)
  local entry = call('HGET', K.returning, gid)
  if not entry then return 0 end
  local r = cjson.decode(entry)
  local more = true
  if r.left > 0 then reset_members(r, most) else more = forget_last_members(r, most) end
  if more then
    call('HSET', K.returning, gid, cjson.encode(r))
    return 1
  end
  call('HDEL', K.returning, gid)
  write_fresh_group(r)
  return 0
end

local function leave_queues(gid, index, aside)
  for _, queue in ipairs({K.ready, K.open_steps, K.ready_steps, K.ready_tokens, K.undecided}) do
    call('ZREM', queue, gid)
  end
  if aside then call('ZREM', K.open, gid) end
  call('ZADD', aside and K.aside or K.open, index, gid)
end

local function begin_group_again(group, reason, aside)
  local gid = group.id
  group.gone = true
  local r = {
    id = gid, index = group.index, needed = group.needed, launched = group.launched, members = group.launched,
    left = group.launched, lost = {}, longest = 0, reason = reason, aside = aside,
  }
  for at, value in ipairs(call('HMGET', group_key(gid), unpack(KEPT_FIELDS))) do r[KEPT_FIELDS[at]] = value or nil end
  if aside then r.spare = nil end
  if call('ZSCORE', K.ready, gid) then r.ended = 1 end
  local first_launched
  if r.first then
    local needed, launched = string.match(r.first, '^(%d+) (%d+)$')
    r.needed, first_launched = tonumber(needed), tonumber(launched)
  end
  -- Forks are more than the members of the admission: `needed` and spare ones.
  r.fresh = aside and r.needed or first_launched or r.needed + tonumber(r.spare or 0)
  r[reason] = integer(tonumber(r[reason] or '0') + 1)
  leave_queues(gid, group.index, aside)
  call('UNLINK', group_key(gid))
  if group.launched <= MOST_MEMBERS_AT_ONCE then
    reset_members(r, group.launched)
    forget_last_members(r, group.launched + 1)
    write_fresh_group(r)
    return false
  end
  local members = {}
  for member = 0, group.launched - 1 do members[member + 1] = gid .. '.' .. member end
  for _, queue in ipairs({K.pending, K.partial, K.resting, K.scoring}) do call('ZREM', queue, unpack(members)) end
  call('HSET', K.returning, gid, cjson.encode(r))
  return true
end

-- Applies to the open and ready ones among these groups that exceed the staleness bound at the next cut; a retry finds no
-- tokens and changes nothing. Returns their number, and the groups whose reset continues.
local function begin_again(gids, reason, aside)
  -- docs/architecture.md: The staleness bound
  local oldest = tonumber(call('HGET', K.meta, 'cut_step')) - tonumber(call('HGET', K.limits, 'max_staleness'))
  local begun, unfinished = 0, {}
  for _, gid in ipairs(gids) do
    local waits = call('ZSCORE', K.open, gid) or call('ZSCORE', K.ready, gid)
    local group = waits and load_group(gid)
    if group and group.step and group.step < oldest then
      if begin_group_again(group, reason, aside) then unfinished[#unfinished + 1] = gid end
      begun = begun + 1
    end
  end
  return begun, unfinished
end
