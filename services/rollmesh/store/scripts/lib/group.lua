-- Groups are read once and written once per script; all scores of a group in one call need one HSET.
local groups, touched = {}, {}
local function group_of(id)
  return string.match(id, '^(.*)%.%d+$')
end

-- Record of the prompt history that a trajectory's group adds to, for the prompt cache of the client; nil without one.
local function record_name(id)
  return call('HGET', group_key(group_of(id)), 'prompt') or nil
end

local function order_of(index, member)
  return index * 4096 + member
end

local function load_group(gid)
  local group = groups[gid]
  if group then return not group.gone and group or nil end
  local v = call('HMGET', group_key(gid), 'index', 'needed', 'launched', 'scored', 'terminal', 'low', 'high', 'step',
    'tokens', 'prompt', 'facts', 'rank', 'expected', 'incarnation', 'spare', 'admitted_at', 'domain', 'round', 'closed',
    'ended')
  if not v[1] then return nil end
  group = {
    id = gid, index = tonumber(v[1]), needed = tonumber(v[2]), launched = tonumber(v[3]), scored = tonumber(v[4]),
    terminal = tonumber(v[5]), low = v[6], high = v[7], step = tonumber(v[8]),
    tokens = tonumber(v[9] or '0'), prompt = v[10], facts = v[11],
    rank = v[12], expected = v[13], incarnation = v[14], spare = v[15], admitted_at = tonumber(v[16]),
    domain = v[17], ended = v[20],
    -- Set while the leader decides at the end of each round.
    round = not v[19] and tonumber(v[18]) or nil,
  }
  groups[gid] = group
  return group
end

-- Most members of a group, replacements and forks included; by default twice the needed ones.
local member_limit
local function most_members(needed)
  member_limit = member_limit or tonumber(call('HGET', K.limits, 'most_members') or '0')
  return member_limit > 0 and member_limit or 2 * needed
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
    fields[11], fields[12] = 'tokens', group.tokens
    if group.facts then fields[13], fields[14] = 'facts', group.facts end
  end
  call('HSET', group_key(group.id), unpack(fields))
end

local function flush_groups()
  for _, group in ipairs(touched) do
    if not group.gone then write_group(group) end
  end
end
