-- uses: core
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
